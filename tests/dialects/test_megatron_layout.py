"""Megatron-LM's texts that say which layers are what, and which stage has them."""

import pytest

from peakcast.dialects.megatron.layout import binary_pattern, layout_stages


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("([0]*3+[1]*11)", [0] * 3 + [1] * 11),
        ("([1]*1+[0]*1)*2", [1, 0, 1, 0]),
        ("[0,1]*2", [0, 1, 0, 1]),
        ("__import__('os')", None),
        ("[2]*3", None),
        ("([0]*99999)", None),
    ],
)
def test_patterns_are_parsed_never_evaluated(text, pattern):
    assert binary_pattern(text) == pattern


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*2|(tt|)*2tmL", ["Ett", "tt", "tt", "tmL"]),
        ("Et*7|t*7mL", ["Ettttttt", "tttttttmL"]),
        ("t*999t*999", ["t" * 1998]),
        ("((t)*999)*999", None),
        ("(t*999)*999", None),
        ("print()", None),
    ],
)
def test_layout_texts(text, stages):
    assert layout_stages(text) == stages
