"""Networks known by their configuration alone: what is kept of it, and what a shorter one keeps."""

from __future__ import annotations

import json
import math
from typing import Any

from peakcast.networks.layer_count import with_layers
from peakcast.networks.undescribed import configuration_of, kept_configuration, undescribed

HYBRID: dict[str, Any] = {"model_type": "granitemoehybrid", "num_hidden_layers": 4, "hidden_size": 64}


def test_bounds_without_end_are_kept_as_transformers_writes_them() -> None:
    """Granite's and Mamba-2's `time_step_limit`; json.dumps of such numbers is no JSON."""
    config = {**HYBRID, "time_step_limit": [0.0, math.inf], "rope": {"low": -math.inf}}
    kept = kept_configuration(config)
    assert json.loads(kept)["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    read = configuration_of(undescribed(config, None))
    assert read == config
    assert kept_configuration(read) == kept


def test_what_is_not_a_number_stays_so() -> None:
    read = configuration_of(undescribed({**HYBRID, "limit": math.nan}, None))
    assert math.isnan(read["limit"])


def test_a_shorter_network_has_no_settings_of_layers_that_it_lacks() -> None:
    """Gemma 4's wider heads are told layer by layer; labels of classes are numbered too, and are no layers."""
    config = {**HYBRID, "per_layer_config": {"01": {"head_dim": 512}, "03": {"head_dim": 512}}, "id2label": {"3": "other"}}
    short = configuration_of(with_layers(undescribed(config, None), 2))
    assert short["num_hidden_layers"] == 2
    assert short["per_layer_config"] == {"01": {"head_dim": 512}}
    assert short["id2label"] == {"3": "other"}
