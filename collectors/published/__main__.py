"""`python -P -m peakcast.collectors.published SOURCES FOLDER`: import the published measurements into tables.

Reads the source files in SOURCES (`READERS`) and writes one table per file into FOLDER, with the file's name. The same
sources give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from peakcast.collectors.published.axolotl_examples import read_axolotl_examples
from peakcast.collectors.published.counts import counts_page
from peakcast.collectors.published.deepspeed_trainer import read_deepspeed_trainer
from peakcast.collectors.published.device_constants import read_device_constants, write_readings
from peakcast.collectors.published.fms_a100 import read_fms_a100
from peakcast.collectors.published.fms_history import read_fms_history
from peakcast.collectors.published.fsdp_qlora import read_fsdp_qlora
from peakcast.collectors.published.liger_examples import read_liger_examples
from peakcast.collectors.published.lightning_thunder import read_lightning_thunder
from peakcast.collectors.published.litgpt_finetune import read_litgpt_finetune
from peakcast.collectors.published.litgpt_resources import read_litgpt_resources
from peakcast.collectors.published.megatron_ci import read_megatron_ci
from peakcast.collectors.published.megatron_logs import read_megatron_logs
from peakcast.collectors.published.optimum_benchmark import read_optimum_benchmark
from peakcast.collectors.published.peft_method_comparison import read_peft_method_comparison
from peakcast.collectors.published.simumax_b200 import read_simumax_b200
from peakcast.collectors.published.swift_benchmark import read_swift_benchmark
from peakcast.collectors.published.torchao_optimizers import read_torchao_optimizers
from peakcast.collectors.published.torchtitan_benchmarks import read_torchtitan_benchmarks
from peakcast.collectors.published.torchtitan_log import read_torchtitan_log
from peakcast.collectors.published.torchtune_readme import read_torchtune_readme
from peakcast.collectors.published.transformers_page import read_transformers_page
from peakcast.core.durable import replace_file
from peakcast.core.errors import PeakcastError
from peakcast.measurements.records import Measurement
from peakcast.measurements.store import CONSTANTS_FOLDER, write_csv

READERS: dict[str, Callable[[Path], list[Measurement]]] = {
    "axolotl_examples.jsonl": read_axolotl_examples,
    "deepspeed_trainer.jsonl": read_deepspeed_trainer,
    "fms_a100.csv": read_fms_a100,
    "fms_history.jsonl": read_fms_history,
    "fsdp_qlora.jsonl": read_fsdp_qlora,
    "liger_examples.jsonl": read_liger_examples,
    "lightning_thunder.jsonl": read_lightning_thunder,
    "litgpt_finetune.jsonl": read_litgpt_finetune,
    "litgpt_resources.jsonl": read_litgpt_resources,
    "megatron_ci.jsonl": read_megatron_ci,
    "megatron_logs.jsonl": read_megatron_logs,
    "optimum_benchmark.jsonl": read_optimum_benchmark,
    "peft_method_comparison.jsonl": read_peft_method_comparison,
    "simumax_b200.jsonl": read_simumax_b200,
    "swift_benchmark.jsonl": read_swift_benchmark,
    "torchao_optimizers.jsonl": read_torchao_optimizers,
    "torchtitan_benchmarks.jsonl": read_torchtitan_benchmarks,
    "torchtitan_log.jsonl": read_torchtitan_log,
    "torchtune_readme.jsonl": read_torchtune_readme,
    "transformers_page.jsonl": read_transformers_page,
}
"""The reader of each source file. A source has a module, a line here, and a section in `datasets/README.md`."""

CONSTANTS = "device_constants_h100.jsonl"
"""The source whose lines have no job: memory that a process holds on a GPU before it has a model."""


def import_published(sources: Path, folder: Path) -> list[Measurement]:
    """Read every published row of the files in `sources`, write one table per source file to `folder`, and return the rows.

    Raises: RecordError when a source is missing or damaged, or `folder` cannot be written.
    """
    rows_of = {name: read(sources / name) for name, read in READERS.items()}  # all are read before any table is written
    readings = read_device_constants(sources / CONSTANTS)
    for name, rows in rows_of.items():
        write_csv(folder / Path(name).with_suffix(".csv").name, rows)
    replace_file(folder / "README.md", counts_page({Path(name).stem: rows for name, rows in rows_of.items()}).encode())
    write_readings(folder / CONSTANTS_FOLDER / Path(CONSTANTS).with_suffix(".csv").name, readings)
    return [row for rows in rows_of.values() for row in rows]


def main(arguments: list[str] | None = None) -> int:
    """The command: print a count per GPU type. Returns 0, or 1 after an error's sentence."""
    parser = argparse.ArgumentParser(prog="python -P -m peakcast.collectors.published", description=__doc__)
    parser.add_argument("sources", type=Path, help="folder of the source files")
    parser.add_argument("folder", type=Path, help="folder of the tables")
    options = parser.parse_args(arguments)
    try:
        rows = import_published(options.sources, options.folder)
    except PeakcastError as error:
        print(error.message, file=sys.stderr)
        return 1
    for gpu, number in sorted(Counter(row.gpu for row in rows).items()):
        own = [row for row in rows if row.gpu == gpu]
        outside, spoiled = sum(bool(row.out_of_scope) for row in own), sum(bool(row.spoiled) for row in own)
        print(f"{gpu}: {number} rows, {outside} out of scope, {spoiled} spoiled, {sum(row.counts for row in own)} count")
    return 0


if __name__ == "__main__":
    sys.exit(main())
