"""Version texts: which release a text means, which versions a container has, and what is installed here.

A version text is a release ("2.11.0+cu130"; a nightly or alpha counts as the release that it leads to), a moving head
("main": newer than every release), or neither, such as the hash of a commit, which is not compared with releases.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from peakcast.core.errors import SpecError, near_misses
from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import Finding

ASSUMED_TORCH = "2.11"
"""The release of torch if a job does not say."""
CONTAINER = "ngc_pytorch"
"""The key of `versions` whose value is the tag of NVIDIA's PyTorch image (catalog/containers.toml)."""
HEADS = ("main", "master", "head", "nightly", "latest")
"""Versions that move: newer than every release."""
NEWEST = (2**31,)
MOST_CHARACTERS = 100
"""Most characters of a version text; no package has a longer one."""
PACKAGES = {
    "torch": "torch", "transformers": "transformers", "accelerate": "accelerate", "peft": "peft", "trl": "trl",
    "bitsandbytes": "bitsandbytes", "flash_attn": "flash-attn", "liger_kernel": "liger-kernel", "unsloth": "unsloth",
    "deepspeed": "deepspeed", "megatron_core": "megatron-core", "transformer_engine": "transformer-engine",
    "torchao": "torchao", "torchtitan": "torchtitan", "torchtune": "torchtune", "litgpt": "litgpt",
}  # fmt: skip
"""Keys of `versions` that an installed package can answer -> the name under which the package is installed."""
STACKS = ("unsloth", "torchtitan", "torchtune", "litgpt", "nanotron", "lightning_thunder")
"""Packages that run the training if a job mentions them. If one is only installed here, that means nothing."""
OWN_NETWORK_STACKS = ("torchtitan", "torchtune", "litgpt", "nanotron")
"""The stacks whose networks are their own, so that the version of transformers does not matter."""
_MONTH = re.compile(r"20\d\d-(?:0[1-9]|1[0-2])(?:-\d\d)?")
_RELEASE = re.compile(
    r"v?(?:\d{1,4}|(\d{1,6}(?:\.\d{1,9}){1,5})(?:[._-]?(?:a|b|c|rc|alpha|beta|pre|preview)[._-]?\d*)?"
    r"(?:[._-]?(?:post|rev|r)[._-]?\d*)?(?:[._-]?dev[._-]?\d*)?)(?:[+-][\w.+-]*)?",
    re.IGNORECASE,
)
"""PEP 440, except that a number without a dot has at most four digits and no suffix, because hashes look like "2a13456"."""


def release(version: object) -> tuple[int, ...]:
    """The numbers of the release that `version` means, at most three: `'2.11.0+cu130'` and `'2.11.0.dev20260101'` give (2,
    11, 0). `NEWEST` for a moving head; () if it is not a release, such as a commit."""
    text = str(version)
    return _numbers_of(text.strip().lower()) if len(text) <= MOST_CHARACTERS else ()


@functools.lru_cache(maxsize=4096)
def _numbers_of(text: str) -> tuple[int, ...]:
    """`release` of a text in lower case; the same few are asked for in every prediction."""
    if text in HEADS:
        return NEWEST
    if _RELEASE.fullmatch(text) is None:
        return ()
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text)
    assert numbers is not None  # the pattern begins with a number
    return tuple(int(part) for part in numbers[1].split(".")[:3])


def compare(version: object, clause: str) -> bool:
    """Whether `version` satisfies the clause of a convention: ">=2.4" and other comparisons of releases, "==a|b" for names,
    "===2.5.0" for a text with this beginning, "*" for any version. A text that is not a release satisfies no comparison of
    releases. Raises: ValueError."""
    if clause.strip() == "*":
        return True
    match = re.fullmatch(r"\s*(>=|<=|===|==|<|>)\s*([\w.|]+)\s*", clause)
    if match is None:
        raise ValueError(f"malformed version clause {clause!r} in frameworks.toml")
    operator, wanted = match.groups()
    if operator == "===":
        return str(version).startswith(wanted)
    if operator == "==" and not wanted[0].isdigit():
        return str(version) in wanted.split("|")
    found = release(version)
    if not found:
        return False
    a, b = _three(found), _three(release(wanted))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[operator]


def _three(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, 0, 0)[:3]


def torch_release(versions: Mapping[str, Any]) -> tuple[int, ...]:
    """The release of torch in a job's `versions`, or the assumed one."""
    return release(resolved(versions).get("torch", ASSUMED_TORCH)) or release(ASSUMED_TORCH)


@functools.cache
def containers() -> Mapping[str, Mapping[str, str]]:
    """NVIDIA's PyTorch images: tag -> package -> version, with their source."""
    text = resources.files("peakcast").joinpath("catalog", "containers.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = tomllib.loads(text)
    return table


def tag_of(container: object) -> str:
    """The tag that `container` means: "26.04", "26.04-py3" and "nvcr.io/nvidia/pytorch:26.04-py3" are the same."""
    return str(container).strip().rpartition(":")[2].removesuffix("-py3")


def resolved(versions: Mapping[str, Any]) -> Mapping[str, Any]:
    """`versions` with those of its container added, and with the releases of the time for versions that are commits or
    months; versions that are given directly have priority."""
    return _resolved_once(versions) if isinstance(versions, FrozenMapping) else _resolved(versions)


@functools.lru_cache(maxsize=1024)
def _resolved_once(versions: FrozenMapping) -> Mapping[str, Any]:
    return _resolved(versions)


def _resolved(versions: Mapping[str, Any]) -> Mapping[str, Any]:
    if CONTAINER in versions:
        tag = tag_of(versions[CONTAINER])
        image = {name: version for name, version in containers().get(tag, {}).items() if name != "source"}
        versions = {**image, **versions, CONTAINER: tag}
    return {**versions, **of_their_time(versions)}


@functools.cache
def _dates() -> Mapping[str, Mapping[str, str]]:
    """Package -> release -> month in which it appeared, in chronological order (catalog/dates.toml)."""
    text = resources.files("peakcast").joinpath("catalog", "dates.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = tomllib.loads(text)
    return table


def of_their_time(versions: Mapping[str, Any]) -> dict[str, str]:
    """The releases assumed for commits in `versions`, and for torch if it is not given and another version is a month
    ("2024-09"). The month is that of torch's nightly, or of that version."""
    commits = [name for name in versions if name in _dates() and name != "torch" and not release(versions[name])]
    months = [str(version)[:7] for version in versions.values() if _MONTH.fullmatch(str(version))]
    torch = [] if "torch" in versions or not months else [max(months)]
    if not commits and not torch:
        return {}
    month = _month_of_torch(str(versions["torch"])) if "torch" in versions else max(months, default="")
    found = {}
    for name in commits if month else ():
        releases, since = list(_dates()[name]), list(_dates()[name].values())
        found[name] = releases[max(0, bisect.bisect_right(since, month) - 1)]
    for month in torch:
        releases, out = list(_dates()["torch"]), list(_dates()["torch"].values())
        found["torch"] = releases[min(len(out) - 1, bisect.bisect_left(out, month))]
    return found


def _month_of_torch(version: str) -> str:
    """The month of a build of torch: a nightly contains it; for a release, three months before it appeared; "" if
    unknown."""
    if match := re.search(r"dev(20\d\d)(0[1-9]|1[0-2])", version):
        return f"{match[1]}-{match[2]}"
    out = _dates()["torch"].get(".".join(map(str, (*release(version)[:2], 0))))
    if out is None:
        return ""
    year, month = map(int, out.split("-"))
    year, month = (year, month - 3) if month > 3 else (year - 1, month + 9)
    return f"{year}-{month:02}"


def remarks(versions: Mapping[str, Any]) -> list[str]:
    """Sentences about the versions that a container stands for, and about numbers that may have lost a zero."""
    found = []
    if "torch" not in versions and (torch := of_their_time(versions).get("torch")):
        found.append(f"torch {torch} is assumed, from the time of the other versions (catalog/dates.toml).")
    if (image := containers().get(tag_of(versions.get(CONTAINER, "")))) is not None:
        has = [f"{name} {image[name]}" for name in image if name != "source" and name not in versions]
        found.append(
            f"NVIDIA's PyTorch image {tag_of(versions[CONTAINER])} has {', '.join(has)} (catalog/containers.toml)."
        )
        if "transformer_engine" not in image and "transformer_engine" not in versions:
            found[-1] += " Its Transformer Engine is not known here; versions.transformer_engine says it."
    for name, version in versions.items():
        if isinstance(version, float) and re.fullmatch(r"\d+\.\d", str(version)):
            found.append(
                f"versions.{name}={version} is a number, to which {version}0 is the same: {version} is assumed. Write it "
                f'in quotes ("{version}").'
            )
    return found


def not_compared(versions: Mapping[str, Any]) -> list[Finding]:
    """A finding for each version that is not a release, and for a container that is not in the table."""
    said, taken = {}, of_their_time(versions)
    for name, version in versions.items():
        if name in taken:
            said[name] = (
                f"versions.{name}={version!r} is no release (a commit, perhaps): {taken[name]} is assumed, from the time "
                f"of torch {versions.get('torch')} (catalog/dates.toml)."
            )
        elif name == CONTAINER:
            if tag_of(version) not in containers():
                said[name] = (
                    f"versions.{name}={version!r} is none of the {len(containers())} images whose contents are known here "
                    f"({min(containers())} to {max(containers())}); give versions.torch and versions.transformer_engine."
                )
        elif not release(version):
            said[name] = (
                f"versions.{name}={version!r} is no release (a commit, perhaps) and is compared with none: where "
                f"releases of {name} differ, its version counts as not given. Give the release that it is nearest to."
            )
    return [Finding("version_not_modelled", f"versions.{name}", "either", sentence) for name, sentence in said.items()]


def check_versions(versions: object, where: str = "versions") -> dict[str, Any]:
    """`versions` as a mapping from packages to versions, with underscores in the names. Raises: SpecError."""
    if not isinstance(versions, Mapping):
        raise SpecError(
            f'{where}={versions!r} must map packages to versions, such as {{"torch": "2.9", "transformers": "4.45.2"}}.',
            parameter=where,
            value=versions,
        )
    found: dict[str, Any] = {}
    for key, version in versions.items():
        name = str(key).strip().lower().replace("-", "_")
        if isinstance(version, bool) or not isinstance(version, (str, int, float)) or not str(version).strip():
            raise SpecError(
                f'{where}.{key}={version!r} must be a version, as text: "2.9".', parameter=f"{where}.{key}", value=version
            )
        if len(str(version)) > MOST_CHARACTERS:
            raise SpecError(
                f"{where}.{key} has {len(str(version)):,} characters; a version has no more than {MOST_CHARACTERS}.",
                parameter=f"{where}.{key}",
                value=version,
            )
        if name == CONTAINER and not re.fullmatch(r"\d\d\.\d\d", tag_of(version)):
            raise SpecError(
                f"{where}.{key}={version!r} must be the tag of NVIDIA's PyTorch image, such as "
                f"{max(containers())!r}{near_misses(tag_of(version), containers())}".rstrip("?")
                + ".",
                parameter=f"{where}.{key}",
                value=version,
            )
        if found.get(name, version) != version:
            raise SpecError(f"{where}.{key} is given twice, also as {found[name]!r}; keep one.", parameter=f"{where}.{key}")
        found[name] = version
    return found


def read_versions(text: str, where: str = "versions") -> dict[str, Any]:
    """The versions in a text such as "torch=2.9,transformers=4.45.2" (commas or blanks between). Raises: SpecError."""
    pairs: dict[str, str] = {}
    for word in re.split(r"[,\s]+", text.strip()):
        name, equals, version = re.sub(r"==", "=", word).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z][\w.-]*", name) or not version:
            raise SpecError(
                f"{where}={text[:200]!r} must be packages with their versions, such as torch=2.9,transformers=4.45.2; "
                f"{word[:50]!r} is none.",
                parameter=where,
                value=text[:200],
            )
        if name in pairs:
            raise SpecError(f"{where} says {name} twice; keep one.", parameter=where, value=text[:200])
        pairs[name] = version
    return check_versions(pairs, where)


def installed() -> dict[str, str]:
    """The versions of `PACKAGES` that are installed in this environment, from their metadata; nothing is imported."""
    import importlib.metadata  # takes longer to import than a prediction

    found: dict[str, str] = {}
    for name, package in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found
