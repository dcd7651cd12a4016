"""What the page asks and answers, as plain functions."""

import json
import zlib
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peakcast import api
from peakcast.core.errors import CatalogError, SpecError
from peakcast.core.units import GIB, format_gib
from peakcast.web.asking import MOST_CHARACTERS, MOST_GPUS, PageState, Searched, answered, searched
from peakcast.web.links import from_query, to_query
from peakcast.web.panels import answer_html, fault_html, plans_html

DEEP = "architecture: {model_type: gpt2, n_layer: 5000000, n_embd: 64, n_head: 4, vocab_size: 99}"

LONG = """architecture: {model_type: gpt2, n_layer: 512, n_embd: 64, n_head: 4, vocab_size: 99}
framework: megatron
parallelism: {pipeline_parallel_size: 512}"""


def test_a_name_is_answered_as_predict_answers_it():
    from peakcast import api

    found = answered(PageState(text="gpt2", gpu="A100-80GB"))
    assert found.prediction.peak_allocated_bytes == api.predict("gpt2", "A100-80GB").peak_allocated_bytes
    assert found.explanation.rank == found.prediction.rank == 0


def test_knobs_change_what_the_configuration_says():
    config = json.dumps({"architecture": "gpt2", "micro_batch_size": 4, "sequence_length": 512})
    plain = answered(PageState(text=config))
    knobs = {"micro_batch_size": 3, "checkpointing": "full", "sequence_length": None}
    changed = answered(PageState(text=config, knobs=knobs))
    assert (changed.job.micro_batch_size, changed.job.sequence_length) == (3, 512)
    assert changed.job.activation_checkpointing.mode == "full"
    said = "checkpointing=full is set on this page and replaces the value of the configuration."
    assert (said in changed.prediction.assumptions, said in plain.prediction.assumptions) == (True, False)
    assert changed.prediction.peak_allocated_bytes.point < plain.prediction.peak_allocated_bytes.point


def test_a_search_finds_what_the_command_line_finds():
    asked = PageState(text="llama-3.2-1b", gpu="RTX4090", knobs={"sequence_length": 2048})
    found = searched(Searched(asked=asked, num_gpus=4))
    job = {"architecture": "llama-3.2-1b", "sequence_length": 2048}
    assert found == api.search(job, "RTX4090", num_gpus=4, top=len(found.plans))
    page = plans_html(found)
    assert "Recommended, the fastest that surely fits: " in page
    assert page.count("<tr>") == 1 + len(found.plans) > 1


def test_a_search_that_finds_nothing_says_what_would_be_needed():
    found = searched(Searched(asked=PageState(text="llama-3.1-405b", gpu="RTX4090")))
    assert "Nothing fits: more GPUs" in plans_html(found)
    with pytest.raises(SpecError, match="is more than this page searches"):
        searched(Searched(asked=PageState(text="gpt2"), num_gpus=MOST_GPUS + 1))


def test_host_memory_and_gpus_of_a_node_are_weighed_as_the_command_line_weighs_them():
    from peakcast import api

    job = {"architecture": "llama-3.1-8b", "framework": "deepspeed", "sequence_length": 2048,
           "activation_checkpointing": {"mode": "full"}, "offload": {"optimizer": True},
           "parallelism": {"data_parallel_size": 8, "zero_stage": 3}}  # fmt: skip
    little = {"host_memory_gib": 32.0, "gpus_per_node": 4}
    found = {
        node.get("host_memory_gib"): answered(PageState(text=json.dumps(job), gpu="H100-80GB", **node)).prediction
        for node in ({}, little, {"host_memory_gib": 4096.0})
    }
    assert [found[gib].fits for gib in (None, 32.0, 4096.0)] == ["yes", "no", "yes"]
    assert found[32.0].to_mapping() == api.predict(job, "H100-80GB", **little).to_mapping()


def test_the_panels_show_each_quantity_with_its_bar():
    from peakcast.web.answering import panels_of

    asked = PageState(text="llama-3.2-1b")
    answer, timeline, layers, communication, notes, job, link = panels_of(asked)
    shown = [name for name in ("allocated", "reserved", "device", "host") if f'<th scope="row">{name}<br>' in answer]
    assert shown == ["allocated", "reserved", "device"]  # nothing of this job is in host memory
    assert "<svg" in timeline
    assert "<table" in layers
    assert "One rank alone sends nothing" in communication
    assert "batches of other lengths" in notes
    assert job.startswith("architecture: llama-3.2-1b")
    assert to_query(asked) in link


def test_the_panels_of_a_job_that_shards_and_offloads_show_what_is_sent_and_the_memory_of_the_host():
    from peakcast.web.answering import panels_of

    job = {"architecture": "llama-3.2-1b", "framework": "deepspeed", "offload": {"optimizer": True}}
    job |= {"parallelism": {"data_parallel_size": 4, "zero_stage": 3}}
    answer, _, _, communication, *_ = panels_of(PageState(text=json.dumps(job), host_memory_gib=512))
    expected = api.predict(job, "H100-80GB", host_memory_gib=512).peak_host_bytes.point
    assert f"{format_gib(4 * expected)} of {format_gib(512 * GIB)} for the 4 ranks of a node" in answer
    sent = sum(row.sent_per_iteration_bytes for row in api.explain(job, "H100-80GB").communication)
    assert f"sends {format_gib(sent)} in one optimizer step" in communication
    assert "all-gather" in communication


def test_flags_are_not_broken_at_their_hyphens_and_a_generation_peaks_in_one_of_its_parts():
    assert '<span class="flag">--micro-batch-size</span> &lt;2&gt;' in fault_html("give --micro-batch-size <2>")
    text = '{"architecture": "gpt2", "task": "inference", "inference": {"prompt_length": 64, "new_tokens": 8}}'
    page = answer_html(answered(PageState(text=text, gpu="T4")))
    assert "The peak is in\nprefill, on rank 0" in page


def test_names_break_after_dots_and_underscores_and_stay_escaped():
    from peakcast.web.panels import breakable

    assert breakable("a.b_c<") == "a.<wbr>b_<wbr>c&lt;"


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (PageState(text="  "), SpecError, "nothing was asked"),
        (PageState(text="llama-3.1-8"), CatalogError, "did you mean"),
        (PageState(text="gpt2", gpu="H1000"), CatalogError, "H100-80GB"),
        (PageState(text="x" * (MOST_CHARACTERS + 1)), SpecError, "at most 200,000 are read"),
        (PageState(text="x" * 2_000), SpecError, "names no network"),
        (PageState(text="--num-layers 2 --hidden-size 64"), SpecError, "num-attention-heads is required"),
        (PageState(text="gpt2", knobs={"micro_batch_size": 0}), SpecError, "micro_batch_size=0"),
        (PageState(text="gpt2", knobs={"shoe_size": 43}), SpecError, "not a knob"),
        (PageState(text=DEEP), SpecError, "layer"),
        (PageState(text=LONG), SpecError, r"virtual_pipeline_stages=512 is more than this page answers \(256\)"),
        (PageState(text="a: &a [x, x]\nb: &b [*a, *a]\n{"), SpecError, "not valid YAML"),
        (PageState(text="- 1\n- 2"), SpecError, "must hold a mapping"),
        (PageState(text="/etc/passwd"), SpecError, "no files are read here"),
        (PageState(text="~/.netrc"), CatalogError, "not in the catalog"),
        (PageState(text="architecture: /etc/passwd\n"), SpecError, "no files are read here"),
        (PageState(text="gpt2", model="/etc/passwd"), SpecError, "no files are read here"),
        (PageState(text="gpt2", host_memory_gib=-1), SpecError, "host_memory_gib=-1 must be a number above 0"),
        (PageState(text="gpt2", host_memory_gib=[8]), SpecError, "must be a number above 0"),
        (PageState(text="gpt2", gpus_per_node=2.5), SpecError, "gpus_per_node=2.5 must be a whole number"),
        (PageState(text="gpt2", num_gpus=8), SpecError, "change parallelism.data_parallel_size"),
        (PageState(text='{"zero_optimization": {"stage": 2}}'), SpecError, "the arguments below, after a line of ---.$"),
        (PageState(text="base_model: gpt2\nmicro_batch_size: 1\ndeepspeed: z2.json\n"), SpecError, "line of --- z2.json.$"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(asked, error, words):
    with pytest.raises(error, match=words):
        answered(asked)


def test_other_files_of_a_run_stand_below_it():
    """The launcher's width and the network are asked for beside them, as on the command line."""
    training = "output_dir: x\nlearning_rate: 1e-4\nbf16: true\ndeepspeed: any/z2.json\n"
    asked = PageState(text=f'{training}--- z2.json\n{{"zero_optimization": {{"stage": 2}}}}', num_gpus=8, model="gpt2")
    job = answered(asked).job
    layout = job.parallelism
    assert (job.architecture.name, layout.data_parallel_size, layout.zero_stage) == ("gpt2", 8, 2)


KNOBS = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=9))


@given(st.text(max_size=200), st.none() | st.integers(), st.text(max_size=20), st.text(max_size=20), KNOBS)
def test_a_link_asks_the_same_question_again(text, num_gpus, model, gpu, knobs):
    asked = PageState(text=text, num_gpus=num_gpus, model=model, gpu=gpu, knobs=knobs)
    assert from_query(to_query(asked)) == asked


def test_a_link_that_is_none_or_would_unpack_to_gigabytes_is_refused():
    bomb = urlsafe_b64encode(zlib.compress(b"0" * 50_000_000, 9)).decode()
    for query in ("", "abc", "%%%", bomb, to_query(PageState(text="gpt2"))[:-9]):
        with pytest.raises(SpecError, match="the link holds no question"):
            from_query(query)
