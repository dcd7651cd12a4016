"""The package versions that a question gives in addition to its job: named versions, or those installed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import CONTAINER, OWN_NETWORK_STACKS, STACKS, check_versions, installed, read_versions
from peakcast.dialects.common.translation import Translation
from peakcast.jobs.conventions import packages_of


@dataclass(frozen=True, slots=True)
class AskedVersions:
    """Versions for any job; its framework decides which of them it uses."""

    given: FrozenMapping = field(default_factory=FrozenMapping)
    """Package -> version as asked for; they override those of a configuration."""
    here: bool = False
    """Whether the versions installed here are used for all other packages."""
    unless_named: bool = False
    """Whether those installed here are used only where the job itself names none."""

    def of(self, framework: str, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The versions of a job: `own`, those of its configuration or dialect, overridden by those that the question gives.
        If `here`, the installed versions of the packages of `framework` are added; that of a stack only if `own` names the
        stack. With `unless_named` those that `own` names stay."""
        own = own or {}
        if self.unless_named and CONTAINER in own:
            return {**own, **self.given}
        known = packages_of(framework)
        if any(stack in own for stack in OWN_NETWORK_STACKS):
            known -= {"transformers"}
        here = {
            name: version
            for name, version in (installed() if self.here else {}).items()
            if name in known and (name not in STACKS or name in own)
        }
        return {**own, **here, **(own if self.unless_named else {}), **self.given}

    def __bool__(self) -> bool:
        return self.here or bool(self.given)


NO_VERSIONS = AskedVersions()
OF_THIS_RUN = AskedVersions(here=True, unless_named=True)
"""Those of a run that is about to start in this process."""


def asked_versions(versions: object = None, container: str | None = None, here: bool | None = False) -> AskedVersions:
    """Those of `--versions` (a text, several, or a mapping), `--container` (a tag) and `--here`. Raises: SpecError."""
    versions = ",".join(versions) if isinstance(versions, list) else versions
    given = read_versions(versions) if isinstance(versions, str) else check_versions(versions or {})
    if container is not None:
        if given.get(CONTAINER, container) != container:
            raise SpecError(f"--container {container} and --versions both name an image; keep one.", parameter="container")
        given = check_versions({**given, CONTAINER: container})
    if here and CONTAINER in given:
        raise SpecError(
            f"--here uses the versions installed here, and --container {given[CONTAINER]} those of an image; keep "
            "one.",
            parameter="here",
        )
    return AskedVersions(FrozenMapping(given), bool(here))


def with_versions(translation: Translation, asked: AskedVersions) -> Translation:
    """`translation` with the versions that the question gives, and a sentence about those that were found installed
    here."""
    if not asked:
        return translation
    versions = asked.of(translation.job.framework, translation.job.versions)
    translation = translation.changed(
        lambda job: job.replace(versions=FrozenMapping(asked.of(job.framework, job.versions)))
    )
    remarks = translation.assumptions
    if asked.here:
        here = installed()
        found = [f"{name} {version}" for name, version in versions.items() if here.get(name) == version]
        remark = f"Versions are those installed here: {', '.join(found) or 'none that matter'}."
        remarks = (*remarks, *([remark] if remark not in remarks else []))
    return replace(translation, assumptions=remarks)
