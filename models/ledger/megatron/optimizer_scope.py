"""Which settings of Megatron-LM's optimizers the ledger does not cover, and which ones Megatron-LM itself refuses."""

from __future__ import annotations

from peakcast.core.findings import FAILS, MORE, UNKNOWN, Check
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def optimizer_checks(job: TrainingJob) -> list[Check]:
    """The checks of every optimizer (`findings.first`)."""
    return [*_muon_checks(job), *_precision_aware_checks(job)]


def _muon_checks(job: TrainingJob) -> list[Check]:
    """Settings of Muon that are not covered, or that its optimizers refuse (megatron-core 0.16.1 `optimizer/muon.py`;
    main's `optimizer/layer_wise_optimizer.py`)."""
    muon, convention = job.optimizer.name == "muon", conventions(job)
    sharded = muon and job.parallelism.zero_stage > 0
    return [
        (
            muon and job.precision.parameters == "float16",
            "Muon with fp16 is refused; bf16 is not.",
            FAILS,
            "precision.parameters",
        ),
        (
            sharded and int(convention.get("num_distributed_optimizer_instances", 1) or 1) > 1,
            "Muon over several instances of the distributed optimizer is refused; use one.",
            FAILS,
            "framework_options.num_distributed_optimizer_instances",
        ),
        (
            sharded and bool(convention.get("overlap_param_gather")) and not convention.get("use_layer_wise_param_layout"),
            "Muon's overlapped all-gather of tensors that are dealt out (overlap-param-gather before megatron-core 0.18 or "
            "with no-use-layer-wise-param-layout) is not modelled: it gathers a bucket beside the parameters.",
            MORE,
            "framework_options.overlap_param_gather",
        ),
        (
            muon and bool(convention.get("fp8_param_gather")),
            "Muon over FP8 parameters is not modelled.",
            UNKNOWN,
            "framework_options.fp8_param_gather",
        ),
    ]


def _precision_aware_checks(job: TrainingJob) -> list[Check]:
    """Settings of Adam in narrow dtypes that Megatron-LM refuses (megatron-core 0.16.1 `optimizer/optimizer_config.py`
    `__post_init__`), and settings of it and of the optimizer on the host that are not covered."""
    convention, asked = conventions(job), bool(conventions(job).get("use_precision_aware_optimizer"))
    narrow = [name for name in ("main_grads_dtype", "main_params_dtype") if convention.get(name, "fp32") != "fp32"]
    adam, offloads = job.optimizer.name in ("adam", "adamw"), job.offload.optimizer
    return [
        (
            bool(narrow) and not asked,
            f"Megatron-LM refuses {' and '.join(narrow)} other than fp32 without use_precision_aware_optimizer.",
            FAILS,
            f"framework_options.{narrow[0] if narrow else ''}",
        ),
        (
            asked and not (adam and job.parallelism.zero_stage),
            "Megatron-LM refuses use_precision_aware_optimizer without Adam and the distributed optimizer.",
            FAILS,
            "framework_options.use_precision_aware_optimizer",
        ),
        (
            asked and offloads and float(convention.get("optimizer_offload_fraction", 1.0)) < 1,
            "A precision-aware optimizer of which a part is on the host is not modelled; all of it on the host is.",
            MORE,
            "framework_options.optimizer_offload_fraction",
        ),
        (offloads and job.optimizer.name == "muon", "Muon on the host is not modelled.", UNKNOWN, "offload.optimizer"),
    ]
