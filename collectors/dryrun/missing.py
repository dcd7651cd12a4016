"""What a script lacked when it failed, and the way out: a package, another release of one, an environment variable, input,
or a minimal file."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ERROR = re.compile(
    r"\S*(?:FileNotFoundError|DataFilesNotFoundError|EmptyDatasetError|NotADirectoryError)\b.*?"
    r"(?:(?P<quote>['\"])(?P<quoted>[^'\"]+)(?P=quote)|(?P<bare>(?<=\s)[^\s'\"/]*/[^\s'\"]+))"
)
ROWS = "64 rows as long as those that it trains on, with the columns that it reads"
LINES = '64 lines as long as those that it trains on, such as {"text": "word word"}, with the keys that it reads'
TABLE = "pandas.DataFrame({'text': ['word ' * 2048] * 64})"
"""Code for a small table; the method that writes it is put in place of WRITTEN."""
WEIGHTS = (
    "the weights as torch.save writes them, for which those of a network made without memory will do (under "
    "torch.device('meta'), torch.save(NETWORK.state_dict(), PATH))"
)
BY_SUFFIX = {
    ".jsonl": LINES,
    ".json": f"a list of {ROWS} (WRITTEN), or the settings that it is to have",
    ".parquet": f"{ROWS} (WRITTEN)",
    ".csv": f"{ROWS} (WRITTEN)",
    ".arrow": "a dataset of 64 rows, by datasets.Dataset.from_dict(...).save_to_disk",
    ".txt": "some 100,000 words",
    ".pt": WEIGHTS,
    ".pth": WEIGHTS,
    ".ckpt": WEIGHTS,
    ".pkl": "a pickle of what it reads, meta.pkl of nanoGPT say, which its prepare.py writes",
    ".yaml": "the settings that it is to have",
    ".yml": "the settings that it is to have",
    ".toml": "the settings that it is to have",
}
WRITERS = {".json": "to_json", ".parquet": "to_parquet", ".csv": "to_csv"}


PACKAGE = re.compile(r".*No (module named '|package metadata was found for )(?P<name>[\w.-]+)")
EXTENSION = re.compile(r"(_cuda|_cuda_lib|_C|_ext|_kernels?)$|^(amp_C|rotary_emb|dropout_layer_norm)$")
"""Names of modules that are compiled for a GPU: selective_scan_cuda, causal_conv1d_cuda, xentropy_cuda_lib."""
BACKEND = re.compile(r"\s*(\S*Error: *)?(?P<what>\w+) requires the (?P<name>[\w.]+) library but it was not found in your")
"""What transformers says of a class whose package is absent."""
VARIABLE = re.compile(r"KeyError: '(?P<name>[A-Z][A-Z0-9_]*)'")
PIP_NAMES = {
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "dotenv": "python-dotenv",
    "megatron": "megatron-core",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "hydra": "hydra-core",
    "Crypto": "pycryptodome",
    "google": "protobuf",
}
"""What pip calls packages that are imported by another name."""
KERNELS = ("flash_attn", "flash_attn_interface", "kernels", "triton")
"""Packages that stand in with a part of their modules (`collectors/dryrun/kernel_packages.py`)."""


def hint(lines: Sequence[str]) -> str:
    """What is missing according to the last `lines` that a failed script printed, and the way out; "" if that is not
    known."""
    if _last(lines).startswith("peakcast.core.errors."):  # says so itself
        return ""
    looks = (_of_networks, _of_programs, _of_environment, _of_releases, _of_operators, _of_files, _of_network)
    said = next(filter(None, (look(lines) for look in looks)), "")
    said = said or _of_rows(lines) or _of_packages(lines)
    unsloth = UNSLOTH if any(IMPORTS_UNSLOTH.search(line) for line in lines) else ""
    return " ".join(filter(None, (said, unsloth)))


IMPORTS_UNSLOTH = re.compile(r"\b(from|import) unsloth\b|\bunsloth/")
UNSLOTH = (
    "Without running it, `peakcast predict SCRIPT` reads what a script with Unsloth says: "
    "FastLanguageModel.from_pretrained, get_peft_model and the arguments of TRL's trainer (SFTConfig)."
)


def _last(lines: Sequence[str]) -> str:
    """The last line that is not blank, such as the error's own; "" if there is none."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _of_environment(lines: Sequence[str]) -> str:
    last = _last(lines)
    if (found := PACKAGE.match(last)) is not None:
        name = found["name"].partition(".")[0]
        if EXTENSION.search(name):
            return (
                f"{name} is a compiled extension of another package: build that where the script runs, or have the script "
                "go the way that it has without it; a dry run replaces it only where torch.utils.cpp_extension builds it."
            )
        if name != found["name"] and name not in (*PIP_NAMES, *KERNELS):  # Python names the first part that is missing
            return (
                f"{name} is there, without {found['name']}: {ANOTHER_RELEASE} A module of the script's own is found from "
                "the folder in which it is started."
            )
        package = PIP_NAMES.get(name, name.replace("_", "-"))
        return (
            f"The Python that runs it has no module {found['name']}: install it there (pip install {package}); a module of "
            "the script's own is found from the folder in which it is started."
        )
    if (found := next(filter(None, map(BACKEND.match, lines[-6:])), None)) is not None:
        package = PIP_NAMES.get(found["name"], found["name"].lower())
        return (
            f"The Python that runs it has no {found['name']}, which {found['what']} needs: install that there (pip install "
            f"{package}), of the release for the torch that is there where it has compiled code."
        )
    if (found := VARIABLE.match(last)) is not None and any("environ" in line for line in lines):
        return f"It reads the environment variable {found['name']}: put {found['name']}=... before the command."
    if "Default process group has not been initialized" in last:
        return "It is written for several ranks: put its launcher before it, such as torchrun --nproc-per-node 8."
    if last.startswith("EOFError") and any(
        "input(" in line or "stdin" in line or "EOF when reading" in line for line in lines
    ):
        return "It reads from standard input, which a dry run does not have; give what it asks for by its arguments."
    return ""


NAME_GONE = re.compile(r"ImportError: cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)' \((?P<file>/.*)\)")
ATTRIBUTE_GONE = re.compile(r"AttributeError: module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
MEMBER_GONE = re.compile(r"(?P<module>\w+) of (?P<package>\w+ \S+) has no (?P<name>\w+)$")
ARGUMENT_GONE = re.compile(r"TypeError: (?P<module>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'")
ARGUMENTS_REFUSED = re.compile(r"\S.*: error: \S")
"""The last line of a program whose arguments its parser refuses (argparse, jsonargparse)."""
FLAGS_GONE = re.compile(r".*(?:unrecognized arguments: |not used by the HfArgumentParser: )(?P<flags>.+)")
STANDARD = os.path.join(os.path.dirname(os.__file__), "")
"""The folder of Python's own library; packages are installed below it."""
INSTALLED = ("site-packages", "dist-packages")
ANOTHER_RELEASE = (
    "install the release that the script was written for, or dry-run it with the Python of an environment that has it "
    "(peakcast dryrun ... -- /path/to/python ...)."
)


def _of_releases(lines: Sequence[str]) -> str:
    """What the release of a library that is installed does not have, but the script asks for."""
    last = _last(lines)
    if (found := FLAGS_GONE.match(last)) is not None:
        return f"It does not take {found['flags']}: leave that out, or {ANOTHER_RELEASE}"
    if ARGUMENTS_REFUSED.match(last) is not None:
        return "It refuses its arguments, as it would on a GPU: give those that it takes."
    if (found := NAME_GONE.match(last) or ATTRIBUTE_GONE.match(last)) is not None:
        if not _raised_in_library(found.groupdict().get("file") or "/site-packages/"):
            return ""
        package = found["module"].partition(".")[0]
        version = _version_of(package, found.groupdict().get("file") or "")
        return f"{package}{version} has no {found['name']} in {found['module']}: {ANOTHER_RELEASE}"
    if (found := MEMBER_GONE.match(last)) is not None:
        if found["package"].startswith("peakcast "):
            return (
                f"What stands in for it in a dry run has no {found['name']} ({found['module']} of {found['package']}): "
                "please report that; until then, peakcast predict can be asked for the same training."
            )
        return f"{found['package']} has no {found['name']} in {found['module']}: {ANOTHER_RELEASE}"
    if (found := ARGUMENT_GONE.match(last)) is not None:
        taker = found["module"].removesuffix(".__init__")
        return f"{taker}, as it is installed, takes no argument {found['name']}: {ANOTHER_RELEASE}"
    return ""


def _raised_in_library(file: str) -> bool:
    return any(folder in file for folder in INSTALLED)


def _version_of(package: str, file: str) -> str:
    """The version of the installed `package` that has `file`, after a space; "" if it is not known."""
    folder = next((parent for parent in Path(file).parents if parent.name in INSTALLED), None)
    found = sorted(folder.glob(f"{package}-*.dist-info")) if folder is not None else []
    return f" {found[0].name.removesuffix('.dist-info').partition('-')[2]}" if found else ""


UNKNOWN_NETWORK = re.compile(r".*\bOSError: (?P<name>\S+) has no config\.json here nor on the hub")


def _of_networks(lines: Sequence[str]) -> str:
    """A network of whose shapes nothing is known."""
    found = next((match for line in lines if (match := UNKNOWN_NETWORK.match(line.strip())) is not None), None)
    if found is None:
        return ""
    return (
        f"Put a folder {found['name']} with that config.json where the script is started, or have the script name a "
        "network of the same shapes that is known: weights are not needed."
    )


TRACEBACK = "Traceback (most recent call last)"


def _of_packages(lines: Sequence[str]) -> str:
    """The installed packages in which an error was raised of which nothing more is known; "" if one of them refuses what
    the script asked for, by a rule of its own, which its message says. What torch refuses may be due to fake tensors."""
    last = max((number for number, line in enumerate(lines) if line.startswith(TRACEBACK)), default=0)
    found = ((PLACE.search(line), after) for line, after in itertools.pairwise(lines[last:]))
    places = [(place["file"], after) for place, after in found if place is not None]
    places = [(file, after) for file, after in places if _raised_in_library(file) or not file.startswith(("<", STANDARD))]
    if not places or not _raised_in_library(places[-1][0]):
        return ""
    frames, refuses = [file for file, _ in places], places[-1][1].strip().startswith("raise ")
    if refuses and _package_of(frames[-1]).partition(" ")[0] != "torch":
        return ""
    packages = list(dict.fromkeys(named for file in reversed(frames) if (named := _package_of(file))))
    stands_in = "what stands in for that is at fault, and peakcast predict can be asked for the same training."
    if len(packages) == 1:
        return f"It was raised in {packages[0]}, as the script calls it: if that trains on a GPU, {stands_in}"
    return (
        f"It was raised in {packages[0]}, called by {packages[1]}. If the run has other releases, dry-run it with the "
        f"Python of their environment (peakcast dryrun ... -- /path/to/python ...); if these train on a GPU, {stands_in}"
    )


def _package_of(file: str) -> str:
    """The installed package that has `file`, with its version; "" if none has."""
    parts = PurePosixPath(file).parts
    at = next((number for number, part in enumerate(parts) if part in INSTALLED), len(parts))
    name = PurePosixPath(parts[at + 1]).stem if at + 1 < len(parts) else ""
    return f"{name}{_version_of(name, file)}" if name else ""


OFF_THE_HUB = re.compile(
    r"\S*OfflineModeIsEnabled: Cannot reach https?://[^/]+/(?:api/)?(?:models/|datasets/)?(?P<name>[\w.-]+/[\w.-]+)"
)
NO_NETWORK = re.compile(r"\S*(URLError|ConnectionError|ConnectTimeout|MaxRetryError|ProxyError|gaierror)\b")


OPERATOR = re.compile(r"\S*(?P<kind>UnsupportedOperatorException|DynamicOutputShapeException): (?P<name>[\w.]+)")
PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def _of_operators(lines: Sequence[str]) -> str:
    """An operator that cannot be followed on tensors without values."""
    last = _last(lines)
    found = OPERATOR.match(last)
    if found is None:
        return ""
    place = next((match for line in reversed(lines) if (match := PLACE.search(line)) is not None), None)
    where = f"{place['file']}:{place['line']} calls" if place is not None else "It calls"
    namespace, _, rest = found["name"].partition(".")
    operator = f"{namespace}::{rest.partition('.')[0]}"
    if found["kind"] == "UnsupportedOperatorException":
        why, way = (
            "of which torch does not know what shapes it returns",
            f"give it a rule (torch.library.register_fake({operator!r}))",
        )
    else:
        why, way = "whose result is as large as only a run with values knows", "have the script take a fixed size there"
    return f"{where} {operator}, {why}; {way}."


MADE_UP = re.compile(r"peakcast: (?P<sentence>the data of .* is not here: .* stood in \(--length\))\.")


def _of_rows(lines: Sequence[str]) -> str:
    found = [match["sentence"] for line in lines if (match := MADE_UP.search(line)) is not None]
    if not found:
        return ""
    return (
        f"{found[-1][0].upper()}{found[-1][1:]}: if the error is about what rows hold, put some 64 of your own there, as "
        "long as those that it trains on."
    )


REFUSED = re.compile(r"(subprocess\.)?CalledProcessError: (?P<command>Command .*) returned non-zero")


def _of_programs(lines: Sequence[str]) -> str:
    found = REFUSED.match(_last(lines))
    if found is None:
        return ""
    return (
        "Programs that a script starts write nothing outside the dry run's temporary folder and have no GPU; if "
        f"c{found['command'][1:]} needs that, run it before, and have the script go on where it is done."
    )


def _of_network(lines: Sequence[str]) -> str:
    if (found := OFF_THE_HUB.match(_last(lines))) is not None:
        return (
            f"It downloads files of {found['name']} from the hub by itself, which a dry run does not: have it download "
            "them once without peakcast, and dry-run it where they are then, or give it a folder that has them."
        )
    if not any(NO_NETWORK.match(line.strip()) for line in lines):
        return ""
    return (
        "It downloads what cannot be fetched here: put that where the script looks before it downloads, or dry-run it "
        "where there is a network; only shapes count."
    )


WRITTEN = re.compile(r"^.*/peakcast-dryrun-\w+/written(?=/)")
"""Where a dry run keeps the files that a script writes."""
STARTS = "raise child_exception_type("
"""The line of `subprocess` that says why a program could not be started."""


def _of_files(lines: Sequence[str]) -> str:
    found = next((match for line in reversed(lines) if (match := ERROR.match(line.strip())) is not None), None)
    if found is None:
        return ""
    path = WRITTEN.sub("", found["quoted"] or found["bare"].rstrip(".,;:"))
    near = lines[-4:]
    if "/" not in path and any(STARTS in line for line in near):
        return f"There is no program {path} here: install the package that has it."
    if PurePosixPath(path).name == "config.json":
        return f"{path} is not here; put there that of the network, as the hub has it (a few lines, without weights)."
    suffix = PurePosixPath(path.rstrip("*")).suffix.lower()
    if not suffix and any("json.load(" in line for line in near):
        suffix = ".json"
    if suffix in BY_SUFFIX:
        least = BY_SUFFIX[suffix].replace("WRITTEN", f"{TABLE}.{WRITERS.get(suffix)}({path!r})")
    elif suffix:
        least = "a small one as it expects"
    elif any("tokenizer" in line.lower() for line in near):
        least = "a tokenizer's folder (tokenizer.json and tokenizer_config.json)"
    elif any(" open(" in line for line in near):
        least = "a small file as it expects"
    else:
        least = "a folder with one small file as it expects"
    return f"{path} is not here; put there {least}: only shapes count."
