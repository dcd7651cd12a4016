"""Replaces packages of GPU kernels that a script imports and this machine lacks: by stubs whose kernels do nothing, with a
note for the user.

Such packages cannot be installed without a GPU, and scripts that do not find them take another code path, which needs
another amount of memory. Installed packages are not replaced, but for Triton's launches.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import DIRECTLY, RunFindings, asker
from peakcast.collectors.machine.imports import when_imported
from peakcast.collectors.tracing import inductor, triton_stub

FLASH_ATTENTION = ("flash_attn", "flash_attn_interface")
"""Flash attention 2 and 3 (Hopper's)."""
ASKS_VERSIONS = frozenset({"peakcast", "importlib"})
"""Packages between a line of the script and a question for a version."""
PACKAGES = (*FLASH_ATTENTION, "kernels", "triton")
NEEDS_NO_GPU = "what they write in compiled code is only known once it is installed, which needs no GPU"


class KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of `PACKAGES` for the script's own code, after all other finders have failed."""

    def __init__(self, notes: RunFindings) -> None:
        self._notes = notes
        self._asked: set[str] = set()
        self._stood_in = False
        """Whether transformers uses the stub of flash attention."""

    def install(self) -> None:
        """Install the finder, for later imports of the script."""
        sys.meta_path.append(self)
        when_imported("transformers.modeling_utils", self._in_modeling)
        when_imported("torch.utils.cpp_extension", self._build_nothing)
        for name in ("jit", "autotuner", "driver"):
            when_imported(f"triton.runtime.{name}", _launch_nothing)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The specification of a package's stub, if the script itself has asked for the package."""
        package = fullname.partition(".")[0]
        if package not in PACKAGES or (package not in self._asked and asker(DIRECTLY) is None):
            return None
        if package not in self._asked:
            self._asked.add(package)
            more = f"; {NEEDS_NO_GPU}" if package == "triton" else ""
            self._say(f"{package} is not installed here: kernels that do nothing stood in for those of it{more}.")
        if package == "triton":
            inductor.load()  # before a stub could be taken for the real package
            triton_stub.find_stubs("triton")
            return importlib.machinery.ModuleSpec(fullname, triton_stub.Finder(("triton",)), is_package=True)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Say to the script's own code that Triton is installed: it may ask for its version before it imports it."""
        if getattr(context, "name", None) == "triton" and asker(ASKS_VERSIONS) is not None:
            yield triton_stub.Installed()

    def create_module(self, spec: Any) -> types.ModuleType:
        """The stub."""
        module = types.ModuleType(spec.name)
        if spec.name == "kernels":
            vars(module).update(get_kernel=self._kernel, has_kernel=lambda *_, **__: True)
        else:
            vars(module).update(_flash_attention(), __version__="2.8.3")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: `create_module` has filled the stub."""

    def _kernel(self, name: str, *_: Any, **__: Any) -> Any:
        """Replaces `kernels.get_kernel`, which loads kernels from the hub."""
        if not _is_flash(name):
            raise ImportError(
                f"{name} is a kernel of the hub that cannot run on fake tensors; dry-run the script without it, or "
                "install the package kernels and have it in the cache."
            )
        functions = _flash_attention()
        return types.SimpleNamespace(**functions, flash_attn_interface=types.SimpleNamespace(**functions))

    def _build_nothing(self, module: Any) -> None:
        """Replace kernels that would be compiled now by functions that do nothing, in the extension and in `torch.ops`: a
        change of a fake tensor's values cannot be seen."""

        def load(name: str, sources: Any = (), *_: Any, **__: Any) -> _Kernels:
            if asker(frozenset({"peakcast"})) is not None:
                self._say(
                    f"{name} is compiled as the script runs: its kernels did nothing; what they allocate is not seen."
                )
            setattr(torch.ops, name, _Kernels())
            return _Kernels()

        module.load = module.load_inline = load
        module.CUDA_HOME = module.CUDA_HOME or "/usr/local/cuda"

    def _in_modeling(self, module: Any) -> None:
        """Give flash attention to networks of transformers that ask for it, whether from the package or from the hub's
        kernels."""
        check = getattr(module.PreTrainedModel, "_check_and_adjust_attn_implementation", None)
        if check is None:
            self._in_old_modeling(module.PreTrainedModel)
            return

        def checked(network: Any, attention: str | None, *arguments: Any, **keywords: Any) -> Any:
            if attention is not None and _is_flash(attention) and self._stands_in():
                attention = self._install_flash_attention(attention)
            return check(network, attention, *arguments, **keywords)

        module.PreTrainedModel._check_and_adjust_attn_implementation = checked

    def _in_old_modeling(self, networks: Any) -> None:
        """The same for transformers before 4.54, which looks for the package in a class method (since 4.36)."""
        check = getattr(networks, "_check_and_enable_flash_attn_2", None)
        if check is None:
            return

        def enabled(cls: type, config: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._stands_in():
                return check.__func__(cls, config, *arguments, **keywords)
            config._attn_implementation = self._install_flash_attention("flash_attention_2")
            return config

        networks._check_and_enable_flash_attn_2 = classmethod(enabled)

    def _stands_in(self) -> bool:
        """Whether flash attention is a stub, or would be if it were imported."""
        return self._stood_in or importlib.util.find_spec(FLASH_ATTENTION[0]) is None

    def _install_flash_attention(self, asked: str) -> str:
        """Install the stub of flash attention in place of the kernels that are `asked` for. Returns the name under which
        transformers finds it."""
        import transformers.modeling_flash_attention_utils as utils

        from peakcast.collectors.tracing import flash_attention_stub

        self._say(f"the kernels of {asked} are not here: some that do nothing stood in for them.")
        self._stood_in = True
        is_packed = getattr(utils, "_is_packed_sequence", None)  # for positions whose values are known
        flash_attention_stub.install(packed=False)
        if is_packed is not None:
            utils._is_packed_sequence = is_packed
        return "flash_attention_2"

    def _say(self, sentence: str) -> None:
        self._notes.add("script_part_skipped", "command", sentence)


class _Kernels:
    """A compiled extension."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _launch_nothing(module: Any) -> None:
    """Make kernels of an installed Triton do nothing, before it asks for a GPU for which to compile them."""
    if getattr(module, "__file__", None) is None:  # the stub
        return
    for name in ("JITFunction", "Autotuner"):
        if hasattr(module, name):
            getattr(module, name).run = lambda *_, **__: None
    if hasattr(module, "driver"):
        module.driver.set_active(triton_stub.driver().active)


def _is_flash(attention: str) -> bool:
    return any(word in attention.lower() for word in ("flash_attention", "flash-attn", "flash-attention", "flash_attn"))


def _flash_attention() -> dict[str, Any]:
    from peakcast.collectors.tracing import flash_attention_stub

    return {**flash_attention_stub.FUNCTIONS, **flash_attention_stub.MORE_FUNCTIONS}
