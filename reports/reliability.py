"""The figures of docs/reliability.md: what was attacked, how often, and how many attacks succeeded, from a run of the
attacks.

`python -P -m peakcast.reports.reliability` runs every test that is marked `attacks`, which takes some ten minutes on two
cores, and writes the table between the two markers of docs/reliability.md in the checkout of the working folder.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from peakcast.core.cores import available_cores
from peakcast.core.errors import RecordError
from peakcast.reports.tables import markdown_table

PAGE = Path("docs/reliability.md")
BEGIN = "<!-- attacks: written by `python -P -m peakcast.reports.reliability` -->"
END = "<!-- /attacks -->"
MOST_AT_ONCE = 4
COLUMNS = ["attacked with", "attacks", "ended badly", "seconds"]


@dataclass(slots=True)
class Attacked:
    """Results of the tests of one kind of attack."""

    attacks: int = 0
    faults: int = 0
    """Number of failed tests. A test of a hundred attacks ends with the first that succeeds."""
    seconds: float = 0.0


def run(report: Path) -> None:
    """Run the attacks and write pytest's XML to `report`."""
    command = [sys.executable, "-P", "-m", "pytest", "tests", "-m", "attacks", "-q", f"--junitxml={report}"]
    several = ["-n", str(min(MOST_AT_ONCE, available_cores())), "--dist", "load"]
    subprocess.run([*command, *several], check=False)  # its failures are what the table counts


def attacked(report: Path) -> dict[str, Attacked]:
    """Kind of attack -> results of its tests, from pytest's XML. Raises: RecordError if the XML has none."""
    found: dict[str, Attacked] = defaultdict(Attacked)
    for case in ElementTree.parse(report).iter("testcase"):
        properties = {item.get("name"): item.get("value") for item in case.iter("property")}
        if "kind" in properties:
            one = found[str(properties["kind"])]
            one.attacks += int(str(properties["attacks"]))
            one.faults += case.find("failure") is not None or case.find("error") is not None
            one.seconds += float(str(case.get("time")))
    if not found:
        raise RecordError(f"{report} holds no attacks; run them with -m attacks.", parameter="report")
    return dict(found)


def table(found: dict[str, Attacked], when: str) -> str:
    """The table and the sentence above it; `when`: place and time of the run."""
    rows = [[kind, f"{one.attacks:,}", f"{one.faults:,}", f"{one.seconds:.0f}"] for kind, one in found.items()]
    attacks, faults = (sum(getattr(one, name) for one in found.values()) for name in ("attacks", "faults"))
    return f"{attacks:,} attacks, {faults:,} of which ended badly ({when}).\n\n{markdown_table(COLUMNS, rows)}"


def refresh(page: Path = PAGE) -> None:
    """Run the attacks and rewrite the table of `page`. Raises: RecordError."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise RecordError(f"{page} has no lines {BEGIN!r} and {END!r}; add them where the table belongs.", parameter="page")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "attacks.xml"
        run(report)
        today = datetime.datetime.now(tz=datetime.UTC).date()
        when = f"{today}, Python {platform.python_version()}, {available_cores()} cores"
        written = table(attacked(report), when)
    page.write_text(f"{before}{BEGIN}\n{written.rstrip()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh()
