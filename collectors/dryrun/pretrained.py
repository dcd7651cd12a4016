"""Replaces what scripts download by name: networks have shapes but no weights; and if a name cannot be downloaded, the
catalog's network, a tokenizer that splits at blanks, and synthetic rows of text are used."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun import checkpoints
from peakcast.collectors.dryrun.checkpoints import header_of
from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.dryrun.outside import hub_as_the_user_has_it
from peakcast.collectors.dryrun.quantized import quantize, quantizer_of
from peakcast.collectors.dryrun.ranks import MESH_SIZES
from peakcast.collectors.dryrun.synthetic_rows import Rows
from peakcast.collectors.machine.imports import when_imported
from peakcast.collectors.stacks.parts import quantized_fakes
from peakcast.core import versions

FEWEST_WORDS = 256
"""A tokenizer of the hub with fewer words was not really downloaded."""
STOOD_IN = "stood in (--length)"
"""End of the sentence about data that is made up."""
SPLITS = ("train", "test", "validation")
HUB_KEYWORDS = {
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "user_agent"),
    *("code_revision", "trust_remote_code", "return_unused_kwargs", "name_or_path", "_from_auto", "_commit_hash"),
}
"""Arguments of `from_pretrained` about how a file is downloaded."""
DTYPE_KEYWORDS = ("dtype", "torch_dtype")
DTYPE_KEYWORD, AS_PUBLISHED = (4, 56), (5, 0)
"""Releases of transformers from which on `_from_config` calls it `dtype` (before, `torch_dtype`), and `from_pretrained`
loads weights as they were published if it is not given (before, in float32): modeling_utils.py of 4.48.1 and 5.17.0."""
SPLIT_KEYWORDS = ("distributed_config", "tp_plan", "tp_size")
"""Arguments of `from_pretrained` that split a network over the ranks."""
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Stand:
    """Replaces what cannot be downloaded, and reports it to `notes`."""

    def __init__(self, notes: RunFindings, lengths: tuple[int, int]) -> None:
        self.notes = notes
        self._rows = Rows(*lengths, self._say)

    def install(self) -> None:
        """Change torch.hub, and the modules that the script will import."""
        _no_weights_of_the_hub()
        checkpoints.install()
        when_imported("transformers.modeling_utils", self._in_modeling)
        when_imported("transformers.models.auto.configuration_auto", self._in_configurations)
        when_imported("transformers.models.auto.tokenization_auto", self._in_tokenizers)
        when_imported("transformers.models.auto.processing_auto", self._in_processors)
        when_imported("datasets", self._in_datasets)
        when_imported("bitsandbytes", lambda _: quantized_fakes.install())
        when_imported("peft.utils.integrations", quantized_fakes.dequantize_for_peft)

    def _in_modeling(self, module: Any) -> None:
        def from_pretrained(cls: Any, /, name: Any, *arguments: Any, config: Any = None, **keywords: Any) -> Any:
            return self._network(cls, str(name), arguments, config, keywords)

        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def _network(self, cls: Any, name: str, arguments: Any, config: Any, keywords: dict[str, Any]) -> Any:
        """The network called `name` with its weights' shapes and dtype, on the requested device."""
        import torch
        from transformers import AutoConfig

        if config is None or isinstance(config, (str, Path)):
            config = AutoConfig.from_pretrained(config or name, trust_remote_code=keywords.get("trust_remote_code"))
        for key, value in keywords.items():
            if hasattr(config, key) and key not in (*DTYPE_KEYWORDS, "attn_implementation"):
                setattr(config, key, value)
        quantizer = quantizer_of(name, config, keywords)
        attention = {key: keywords[key] for key in ("attn_implementation",) if keywords.get(key)}
        dtype = {"dtype" if _is_from(DTYPE_KEYWORD) else "torch_dtype": _dtype(name, config, keywords)}
        network = cls._from_config(config, *arguments, **dtype, **attention)
        network.eval()
        network.name_or_path = name
        place, mesh = keywords.get("device_map"), None
        if any(keywords.get(key) is not None for key in SPLIT_KEYWORDS):
            place, mesh = self._split(cls, network, keywords)
        if quantizer is not None:
            quantize(network, quantizer, self.notes)
        elif place is not None and place != "cpu":
            network.to("cuda")
        if place is not None and mesh is None:
            network.hf_device_map = {"": place if place == "cpu" else torch.cuda.current_device()}
        return network

    def _split(self, cls: Any, network: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
        """Split `network` over the ranks as transformers does before it loads weights; returns (the device on which it is
        then, the mesh)."""
        if not hasattr(cls, "maybe_distribute_model"):
            self._say(
                "the ranks were taken to hold the whole network each: how this release of transformers splits one "
                f"({', '.join(key for key in SPLIT_KEYWORDS if keywords.get(key) is not None)}) is not followed."
            )
            return keywords.get("device_map"), None
        from transformers.distributed import DistributedConfig

        asked = keywords.get("distributed_config")
        if asked is None:
            asked = DistributedConfig(tp_plan=keywords.get("tp_plan"), tp_size=keywords.get("tp_size"))
        asked, place, mesh = cls.prepare_distribute_model(
            asked, device_mesh=keywords.get("device_mesh"), device_map=keywords.get("device_map")
        )
        cls.maybe_distribute_model(network, asked, mesh)
        if mesh is not None:
            network.tie_weights()  # as after loading; shards of tied weights are made one by one
            if mesh.mesh_dim_names is None:  # transformers' own
                MESH_SIZES["tp"] = mesh.size()
        return place, mesh

    def _in_configurations(self, module: Any) -> None:
        fetch = module.AutoConfig.from_pretrained.__func__

        def from_pretrained(cls: Any, /, name: Any, **keywords: Any) -> Any:
            try:
                return fetch(cls, name, **keywords)
            except (OSError, ValueError) as error:
                found = _elsewhere(str(name), module)
                if found is None:
                    raise OSError(
                        f"{name} has no config.json here nor on the hub, and is not in peakcast's catalog ({error})"
                    ) from error
                config, whose = found
                config.name_or_path = str(name)
                self._say(f"the config of {name} is not in the cache here: that of {whose} was taken.")
                rest = {name: value for name, value in keywords.items() if name not in HUB_KEYWORDS}
                for key in [key for key in rest if hasattr(config, key) and key not in DTYPE_KEYWORDS]:
                    setattr(config, key, rest.pop(key))
                return (config, rest) if keywords.get("return_unused_kwargs") else config

        module.AutoConfig.from_pretrained = classmethod(from_pretrained)

    def _in_tokenizers(self, module: Any) -> None:
        self._in_auto(module.AutoTokenizer)

    def _in_processors(self, module: Any) -> None:
        self._in_auto(module.AutoProcessor)

    def _in_auto(self, auto: Any) -> None:
        fetch = auto.from_pretrained.__func__

        def from_pretrained(cls: Any, /, name: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                fetched = fetch(cls, name, *arguments, **keywords)
            except (OSError, ValueError):
                pass
            except (TypeError, AttributeError):  # transformers 4 opens a vocabulary that it does not have
                if Path(str(name)).exists():
                    raise
            else:
                # if it knows the family but has no file, transformers 5 makes a tokenizer without words
                if _has_words(Path(str(name))) or not hasattr(fetched, "vocab_size") or len(fetched) > FEWEST_WORDS:
                    return fetched
            self._say(f"the tokenizer of {name} is not in the cache here: one stood in that made a token of each word.")
            made = _words_tokenizer(_of_the_network(name, "vocab_size"), _positions_of(name))
            for setting, value in keywords.items():
                if value is not None and (setting in OF_TOKENIZERS or setting in TOKENS):
                    setattr(made, setting, value)
            return made

        auto.from_pretrained = classmethod(from_pretrained)

    def _in_datasets(self, module: Any) -> None:
        fetch = module.load_dataset
        module.disable_caching()
        for user in (module.fingerprint, module.arrow_dataset):  # nothing is cached by its content
            user.update_fingerprint = lambda *_, **__: module.fingerprint.generate_random_fingerprint()

        def load_dataset(path: str, *arguments: Any, split: Any = None, **keywords: Any) -> Any:
            try:
                return fetch(path, *arguments, split=split, **keywords)
            except Exception:
                files = _names(keywords.get("data_files"))
                if Path(path).exists() or any(Path(file).exists() for file in files):
                    raise
                self._say(f"the data of {files[0] if files else path} is not here: {self._rows} {STOOD_IN}.")
                if split is None or isinstance(split, dict):
                    return self._rows.splits(module, split or SPLITS)
                rows = self._rows.made(module)
                return [rows for _ in split] if isinstance(split, (list, tuple)) else rows

        module.load_dataset = load_dataset

    def _say(self, sentence: str) -> None:
        self.notes.add("script_part_skipped", "command", sentence)


def _has_words(folder: Path) -> bool:
    """Whether `folder` has a tokenizer's file beside the configuration of a network."""
    return folder.is_dir() and any(OF_WORDS.search(file.name) for file in folder.iterdir())


def _names(files: Any) -> list[str]:
    """The names of files that `load_dataset` is given: one, several, or some of each split."""
    if isinstance(files, dict):
        return [name for part in files.values() for name in _names(part)]
    return [os.fspath(files)] if isinstance(files, (str, os.PathLike)) else [os.fspath(one) for one in files or ()]


def _no_weights_of_the_hub() -> None:
    """Make `torch.hub` fetch no weights, as torchvision asks it to, and networks load none."""
    import torch

    load = torch.nn.Module.load_state_dict

    def load_state_dict(network: Any, state_dict: Any, *arguments: Any, **keywords: Any) -> Any:
        if not state_dict:
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(network, state_dict, *arguments, **keywords)

    torch.hub.load_state_dict_from_url = lambda *_, **__: {}
    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _elsewhere(name: str, module: Any) -> tuple[Any, str] | None:
    """(configuration, where it is from) of a network that is not in the cache: from the catalog by its name without owner,
    or from the hub by one plain request. None if neither has it."""
    from peakcast import catalog
    from peakcast.core.errors import PeakcastError
    from peakcast.dialects.common import hub
    from peakcast.networks.reverse import hf_config_of
    from peakcast.networks.undescribed import configuration_of

    try:
        known = name.rpartition("/")[2]
        architecture, dtype = catalog.architecture(known), catalog.checkpoint_dtype(known)
        told = configuration_of(architecture) or hf_config_of(architecture)
        return _with_class(module.AutoConfig.for_model(dtype=dtype, **told)), f"peakcast's catalog, in {dtype},"
    except (PeakcastError, ValueError):
        pass
    try:
        if hub.is_hub_id(name):
            with hub_as_the_user_has_it():
                return module.AutoConfig.for_model(**hub.config_of(name)), "the hub"
    except (PeakcastError, ValueError, TypeError):
        pass
    return None


def _with_class(config: Any) -> Any:
    """`config` with the name of its class, which every configuration on the hub has."""
    from transformers.models.auto import modeling_auto as classes

    for table in (classes.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, classes.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        if config.architectures is None and config.model_type in table:
            config.architectures = [table[config.model_type]]
    return config


def _is_from(release: tuple[int, ...]) -> bool:
    """Whether the transformers that is installed is of `release` or newer."""
    import transformers

    return (versions.release(transformers.__version__) or release) >= release


def _dtype(name: str, config: Any, keywords: dict[str, Any]) -> Any:
    """The dtype in which `from_pretrained` loads the network called `name`."""
    import torch

    asked = next((keywords[key] for key in DTYPE_KEYWORDS if keywords.get(key) is not None), None)
    if asked is None and not _is_from(AS_PUBLISHED):
        return torch.get_default_dtype()
    if asked in (None, "auto"):
        asked = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or _dtype_of(name)
    return (getattr(torch, asked) if isinstance(asked, str) else asked) or torch.float32


def _dtype_of(name: str) -> str | None:
    """The dtype of a local checkpoint's first weights, from the header of its first safetensors file."""
    for file in sorted(Path(name).glob("*.safetensors"))[:1] if Path(name).is_dir() else ():
        with file.open("rb") as content:
            kinds = (entry.get("dtype") for key, entry in header_of(content).items() if key != "__metadata__")
            return next((_DTYPES[kind] for kind in kinds if kind in _DTYPES), None)
    return None


TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
OF_WORDS = re.compile(r"^(tokenizer|vocab|merges|spiece|sentencepiece)|\.(model|tiktoken|bpe)$")
"""Names of files from which tokenizers are made."""
OF_TOKENIZERS = ("model_max_length", "padding_side", "truncation_side")
"""Settings of tokenizers that scripts give to `from_pretrained`, beside tokens."""
CHAT_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>", "[PAD]", "[INST]", "[/INST]"),
)
"""Tokens that commands and chat templates name: those of Qwen, Llama 3, Gemma, Phi and Mistral."""


def _of_the_network(name: Any, size: str) -> int:
    """A `size` of the network called `name`: the number of words, as many as scripts resize embeddings to, or of positions.
    0 if that is not known."""
    from transformers import AutoConfig

    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        return int(getattr(AutoConfig.from_pretrained(name).get_text_config(), size))
    return 0


BEHIND_PADDING = "create_position_ids_from_input_ids"
"""The function by which networks like RoBERTa give tokens positions behind that of padding (transformers 5.17
`modeling_roberta.py`)."""


def _positions_of(name: Any) -> int:
    """The number of tokens for which the network called `name` has positions; 0 if that is not known."""
    import transformers
    from transformers import AutoConfig

    positions = _of_the_network(name, "max_position_embeddings")
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        family = AutoConfig.from_pretrained(name).model_type.replace("-", "_")
        code = Path(transformers.__file__).parent / "models" / family / f"modeling_{family}.py"
        if BEHIND_PADDING in code.read_text(encoding="utf-8"):
            return positions - _of_the_network(name, "pad_token_id") - 1
    return positions


MOST_WORDS = 2**20
"""Words that a text may have, unless the network has fewer positions."""


def _words_tokenizer(size: int, positions: int = 0) -> Any:
    """A tokenizer of at least `size` words, one of which is "word"; each blank ends a token. `positions`: the most of a
    text that are kept where it is cut and no other number is given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = (*TOKENS.values(), "word", *CHAT_TOKENS)
    others = (f"word{number}" for number in range(len(known), size))
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate((*known, *others))}, TOKENS["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    class WordsTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
        """Cuts long texts itself: tokenizers would keep what it cuts, and of pairs of texts each part with each."""

        def __call__(self, text: Any = None, text_pair: Any = None, *arguments: Any, **keywords: Any) -> Any:
            if keywords.get("truncation") and not keywords.get("return_overflowing_tokens"):
                most = keywords.get("max_length") or self.model_max_length
                text, text_pair = _first_words(text, most), _first_words(text_pair, most)
            return super().__call__(text, text_pair, *arguments, **keywords)

    names = ["input_ids", "attention_mask"]  # transformers 4 would add token_type_ids, which decoders refuse
    made = WordsTokenizer(tokenizer_object=words, model_input_names=names, **TOKENS)
    made.chat_template = "{% for message in messages %}{{ message['content'] }} </s>{% endfor %}"
    made.model_max_length = positions or MOST_WORDS
    return made


def _first_words(text: Any, most: int) -> Any:
    """The first `most` words of a text, or of each text of a list."""
    if isinstance(text, str):
        return " ".join(text.split(maxsplit=most)[:most])
    return [_first_words(one, most) for one in text] if isinstance(text, list) else text
