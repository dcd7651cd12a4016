"""Steps of peakcast's installation and of making its wheel; no other module imports this one."""

from __future__ import annotations

import compileall
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

OLDEST = "cp311"
"""The CPython whose limited API the C sources ask for (Py_LIMITED_API there, `requires-python` in pyproject.toml)."""


class BuildPy(build_py):  # type: ignore[misc]
    """Byte-compiles the modules of an editable install, as installers do for other installs. Otherwise Python compiles them
    at the first import, if it may write beside them; if not (PYTHONDONTWRITEBYTECODE, a read-only folder), every start
    would compile two hundred modules again."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for package in self.packages or ():
                compileall.compile_dir(self.get_package_dir(package), maxlevels=0, quiet=1)


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """Names the wheel after what is in it: `cp311-abi3-<platform>` where the C sources were compiled, `py3-none-any` where
    none was (no compiler, or a free-threaded CPython, which has no limited API)."""

    def finalize_options(self) -> None:
        if not sysconfig.get_config_var("Py_GIL_DISABLED"):
            self.py_limited_api = OLDEST
        super().finalize_options()

    def run(self) -> None:
        self.run_command("build_ext")
        extensions = self.get_finalized_command("build_ext")
        if not any(Path(path).is_file() for path in extensions.get_outputs()):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()
