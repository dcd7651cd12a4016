"""Run by the Python of an environment that a wheel of peakcast was installed in, with nothing but what that brings:
`python -P .ci/check_wheel.py [--pure]`. Says whether the wheel is complete, answers, and replays with the compiled code
(`--pure`: without it)."""

import importlib.util
import pathlib
import sys
import sysconfig

import peakcast
from peakcast.models.allocator import events as allocator_events
from peakcast.models.allocator import replay as allocator

site = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
assert peakcast.__file__.startswith(site), f"not the wheel: {peakcast.__file__}"
for name in ("datasets", "models", "collectors", "reports"):
    found = importlib.util.find_spec(name)
    assert found is None or not str(found.origin).startswith(site), f"the wheel installs a top-level {name!r}"
compiled = [allocator.compiled is not None, allocator_events.compiled is not None]
assert compiled == [sys.argv[1:] != ["--pure"]] * 2, f"compiled: {compiled}"
folder = pathlib.Path(peakcast.__file__).parent
data = "catalog/gpus.toml", "catalog/families/llama.toml", "models/calibration/H100-80GB.json"
for file in ("reports/templates/report.html.j2", *data, "py.typed"):
    assert (folder / file).is_file(), f"the wheel has no {file}"
answer = peakcast.predict("llama-3.1-8b", "H100-80GB")
peak = answer.peak_reserved_bytes
print(f"{sys.version.split()[0]}, compiled: {compiled[0]}, reserved peak {peak.baseline:,} bytes, fits: {answer.fits}")
