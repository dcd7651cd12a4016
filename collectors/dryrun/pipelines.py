"""One stage of a pipeline (`torch.distributed.pipelining`) by itself: it needs the shapes that the other stages would send.

To learn what the previous stage sends, the script is run again as a rank that has that stage, until that run knows the
shapes; it asks the stage before it in the same way. The answers are kept in the dry run's folder for later runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.machine.imports import when_imported
from peakcast.core.errors import CollectorError


class StageShapes:
    """Shapes that stages exchange. `question` is the dry run's; if it has "sends", the run only reports what that stage
    sends."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self._question = question
        self._folder = Path(question.get("told", question["folder"]))

    def install(self) -> None:
        """Change the modules that the script will import."""
        when_imported("torch.distributed.pipelining.stage", self._in_stages)

    def _in_stages(self, module: Any) -> None:
        stage = module.PipelineStage
        if hasattr(stage, "_recv_meta"):  # from torch 2.12 on
            stage._recv_meta = lambda stage, source: self._received(stage, source)
            stage._send_meta = lambda stage, meta, target: self._sent(stage, meta, target)

    def _received(self, stage: Any, source: int) -> Any:
        """What a stage receives: gradients have the shapes of the outputs to which they belong; the outputs of the previous
        stage come from a run of its rank."""
        from torch.distributed.pipelining import _utils

        if source < stage.stage_index:
            return self._told(stage, source)
        outputs = stage._stage_meta.outputs or ()
        metas = (dataclasses.replace(one, requires_grad=False) if one.requires_grad else None for one in outputs)
        return _utils._StageBackwardMeta(backward_metas=tuple(metas))

    def _told(self, stage: Any, source: int) -> Any:
        """What stage `source` sends to the next one. Raises: CollectorError if the run of its rank fails."""
        path = self._path(source)
        if not path.is_file():
            rank = stage._resolve_peer_global_rank(source)
            question = {**self._question, "rank": rank, "sends": source, "told": str(self._folder)}
            asked = path.with_suffix(".json")
            asked.write_text(json.dumps(question), encoding="utf-8")
            print(f"peakcast: stage {source} of the pipeline says what it sends, as rank {rank}", flush=True)
            subprocess.call([sys.executable, "-P", "-m", "peakcast.collectors.dryrun", str(asked)])
        if not path.is_file():
            raise CollectorError(
                f"stage {stage.stage_index} of the pipeline cannot know what stage {source} sends, whose rank fails (its "
                "lines above say why); give PipelineStage its input_args and output_args."
            )
        return pickle.loads(path.read_bytes())  # of a process of the same script

    def _sent(self, stage: Any, meta: Any, target: int) -> None:
        if target < stage.stage_index:
            return
        path = self._path(stage.stage_index)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(meta))
        written.replace(path)
        if self._question.get("sends") == stage.stage_index:
            os._exit(0)

    def _path(self, stage: int) -> Path:
        return self._folder / f"stage-{stage}.pickle"
