"""Networks of the catalog that recipes answer, such as those that see images: transformers builds what is published."""

from __future__ import annotations

import pytest

from peakcast import catalog

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS = ("ImageTextToText", "CausalLM", "MaskedLM", "Seq2SeqLM", "SpeechSeq2Seq")
HEADS += ("ImageClassification", "ZeroShotImageClassification")
NAMES = [one for one in catalog.architecture_names() if catalog.architecture(one).kind in ("multimodal", "undescribed")]
EVERY = 4
"""One network in so many is built in the default lane, and all in `whole`."""
LARGEST = ("70b", "72b", "80b-a3b", "minimax-m2", "128e")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # DeBERTa's
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if index % EVERY == 0 else pytest.mark.whole)
        for index, name in enumerate(name for name in NAMES if not name.endswith(LARGEST))
    ],
)
def test_transformers_builds_what_is_published(name: str) -> None:
    """The network with one of its heads, or without any: files on the hub have either."""
    given = dict(catalog._file(name)["config"])
    config = transformers.CONFIG_MAPPING[given.pop("model_type")](**given)
    classes = [getattr(transformers, f"AutoModelFor{head}") for head in HEADS]
    classes = [each for each in classes if type(config) in each._model_mapping] + [transformers.AutoModel]
    with torch.device("meta"):
        counts = [sum(each.numel() for each in one.from_config(config).parameters()) for one in classes]
    published, tolerance = catalog.published_num_parameters(name), catalog.published_num_parameters_tolerance(name)
    assert any(abs(count - published) <= tolerance for count in counts), counts
