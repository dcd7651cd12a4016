"""A stage of a pipeline (`torch.distributed.pipelining`), alone: what others would tell it of what they send."""

from __future__ import annotations

import dataclasses
from typing import Any

from peakcast.collectors.dryrun.imports import when_imported


def install() -> None:
    """For what the script will import."""
    when_imported("torch.distributed.pipelining.stage", _in_stages)


def _in_stages(module: Any) -> None:
    stage = module.PipelineStage
    if hasattr(stage, "_recv_meta"):  # from torch 2.12 on
        stage._recv_meta, stage._send_meta = _received, lambda *_, **__: None


def _received(stage: Any, source: int) -> Any:
    """Gradients are shaped as the results that they are of; what comes from the stage before, only that one knows."""
    from torch.distributed.pipelining import _utils

    if source < stage.stage_index:
        raise ValueError(
            f"stage {stage.stage_index} of the pipeline runs alone, and cannot know the shapes of what the stage before it "
            "sends: give PipelineStage its input_args (and output_args), or ask for a rank of the first stage (--rank 0)."
        )
    outputs = stage._stage_meta.outputs or ()
    metas = (dataclasses.replace(one, requires_grad=False) if one.requires_grad else None for one in outputs)
    return _utils._StageBackwardMeta(backward_metas=tuple(metas))
