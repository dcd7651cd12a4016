"""The page: inputs on the left, the answer on the right; any change asks again."""

from __future__ import annotations

from typing import Any

import gradio as gr

from peakcast import catalog
from peakcast.core.errors import PeakcastError
from peakcast.web import panels
from peakcast.web.answering import AT_ONCE, workers
from peakcast.web.asking import PageState, Searched
from peakcast.web.links import from_query

FIRST = PageState(
    text="architecture: llama-3.1-8b\nactivation_checkpointing: {mode: full}\noptimizer: {implementation: fused}\n",
    gpu="H100-80GB",
)
"""The question that the page shows at first. It sets no knob, because knobs would stay set for what is pasted next."""
STEP: dict[str, tuple[str, list[str] | None]] = {
    "micro_batch_size": ("Micro-batch size", None),
    "sequence_length": ("Sequence length", None),
    "checkpointing": ("Activation checkpointing", ["none", "full"]),
    "method": ("Fine-tuning", ["full", "lora", "qlora"]),
    "lora_rank": ("LoRA rank", None),
    "optimizer": ("Optimizer", ["adamw", "adamw_8bit", "sgd", "adafactor", "lion"]),
    "optimizer_implementation": ("Its implementation", ["fused", "foreach", "loop"]),
    "attention": ("Attention", ["sdpa", "eager", "flash_attention_2", "flex"]),
}
LAYOUT: dict[str, tuple[str, list[str] | None]] = {
    "data_parallel_size": ("Data-parallel ranks", None),
    "sharding": ("Sharding", ["none", "fsdp1", "fsdp2", "hsdp"]),
    "zero_stage": ("ZeRO stage", None),
    "tensor_parallel_size": ("Tensor-parallel ranks", None),
    "pipeline_parallel_size": ("Pipeline stages", None),
    "context_parallel_size": ("Context-parallel ranks", None),
}
"""Knob (a flag of the command line) -> its label and its choices; None means an integer."""
KNOBS = {**STEP, **LAYOUT}
AS_GIVEN = ""
SHOW_ANSWER = """() => {
  const answer = document.getElementById("answer");
  if (answer.getBoundingClientRect().top > innerHeight) answer.scrollIntoView({behavior: "smooth"});
}"""
"""On a narrow screen the answer is below the inputs, out of sight of the button."""
SAY_ANSWER = """() => {
  const said = document.createElement("p");
  said.id = "said";
  said.setAttribute("role", "status");
  document.body.append(said);
  const say = () => {
    const parts = document.querySelectorAll("#answer h2, #answer h2 + p");
    said.textContent = Array.from(parts, part => part.textContent).join(" ");
  };
  const changes = {childList: true, subtree: true, characterData: true};
  new MutationObserver(say).observe(document.getElementById("answer"), changes);
  say();
}"""
"""Screen readers announce the verdict and its numbers when they change, and not the whole answer: an element that exists
before has their text (WAI-ARIA 1.2, role status)."""
NUM_OUTPUTS = 7


def _question_of(
    text: str,
    num_gpus: int | None,
    model: str,
    versions: str,
    gpu: str,
    host_memory_gib: float | None,
    gpus_per_node: int | None,
    *values: Any,
) -> PageState:
    """The state of the page, from the values of its inputs."""
    knobs = {name: value for name, value in zip(KNOBS, values, strict=True) if value not in (None, AS_GIVEN)}
    return PageState(
        text=text or "",
        num_gpus=num_gpus or None,
        model=model or "",
        versions=versions or "",
        gpu=gpu,
        host_memory_gib=host_memory_gib or None,
        gpus_per_node=gpus_per_node or None,
        knobs=knobs,
    )


def ask(*inputs: Any) -> tuple[str, ...]:
    """The panels of one question: answer, timeline, layers, communication, notes, job file, link. An error is shown in the
    first."""
    return _reply(_question_of(*inputs), NUM_OUTPUTS)


def look(num_gpus: int | None, *inputs: Any) -> str:
    """The panel of a search for layouts over `num_gpus` GPUs; None: those of the run."""
    return _reply(Searched(asked=_question_of(*inputs), num_gpus=num_gpus or None), 1)[0]


def _reply(question: PageState | Searched, num_panels: int) -> tuple[str, ...]:
    try:
        found: tuple[str, ...] = workers().ask(question)
        return found
    except PeakcastError as error:
        return _fault(error.message, num_panels)
    except Exception as error:  # the page shows it, the server goes on
        return _fault(f"this is a bug in peakcast: {type(error).__name__}: {error}", num_panels)


def _fault(message: str, num_panels: int = NUM_OUTPUTS) -> tuple[str, ...]:
    return (panels.fault_html(message), *[""] * (num_panels - 1))


def restored(request: gr.Request) -> tuple[Any, ...]:
    """The inputs and panels for the question in the link; those of `FIRST` without a link."""
    query = request.query_params.get("q", "")
    try:
        asked = from_query(query) if query else FIRST
    except PeakcastError as error:
        return (*_inputs(FIRST), *_fault(error.message))
    inputs = _inputs(asked)
    return (*inputs, *ask(*inputs))


def _inputs(asked: PageState) -> tuple[Any, ...]:
    """The values of the inputs for `asked`, in the order of `ask`."""
    values = (asked.knobs.get(name, AS_GIVEN if choices else None) for name, (_, choices) in KNOBS.items())
    node = (asked.host_memory_gib, asked.gpus_per_node)
    return (asked.text, asked.num_gpus, asked.model, asked.versions, asked.gpu, *node, *values)


def page(*, reports: bool) -> gr.Blocks:
    """The page; `reports` adds a link to the accuracy reports on this server.

    The question, the answer and the knobs follow each other, as they do on a phone; `style.css` puts the answer beside
    the others where there is room.
    """
    blocks = gr.Blocks(analytics_enabled=False, title="peakcast: will this training run fit?", fill_width=True)
    with blocks:
        accuracy = ' How far off it is: <a href="/reports/index.html">accuracy reports</a>.' if reports else ""
        gr.HTML(
            "<h1>Will this training run fit?</h1><p>Paste the configuration that you have, or name a model. Nothing leaves "
            f"this machine.{accuracy}</p>",
            elem_classes="page",
        )
        with gr.Row(elem_id="layout"):
            with gr.Column(elem_id="question", min_width=300):
                text, button, gpu = _question()
            with gr.Column(elem_id="found", min_width=320):
                outputs = _answer()
                with gr.Accordion("Which layouts fit", open=False, elem_id="layouts"):
                    spread, searches, plans = _search()
            with gr.Column(elem_id="knobs", min_width=300):
                with gr.Accordion("What the configuration leaves open", open=False):
                    typed, chosen = _left_open()
                with gr.Accordion("Change the step"):
                    knobs = _knobs(STEP)
                with gr.Accordion("Change the layout over GPUs", open=False):
                    knobs += _knobs(LAYOUT)
        (model, versions), (num_gpus, host_memory, per_node) = typed, chosen
        inputs = [text, num_gpus, model, versions, gpu, host_memory, per_node, *knobs]
        changed = [button.click, *(box.submit for box in (text, *typed)), *(box.input for box in (gpu, *chosen, *knobs))]
        gr.on(changed, ask, inputs, outputs, api_name="ask", concurrency_limit=AT_ONCE)
        gr.on(changed, lambda: "", None, plans, api_visibility="private")  # those found were of another question
        gr.on(
            [searches.click, spread.submit], look, [spread, *inputs], plans, api_name="search", concurrency_limit=AT_ONCE
        )
        button.click(None, None, None, js=SHOW_ANSWER)
        blocks.load(None, None, None, js=SAY_ANSWER)
        blocks.load(restored, None, [*inputs, *outputs], api_visibility="private", concurrency_limit=AT_ONCE)
    return blocks


def _question() -> tuple[gr.Textbox, gr.Button, gr.Dropdown]:
    """Where the configuration is pasted, the button, and the GPU type."""
    text = gr.Textbox(
        label="Model name or configuration",
        info="A catalog name such as llama-3.1-8b, a config.json, a job file, Megatron-LM arguments, ... "
        "Other files of the same run go below it, each after a line of --- with its name.",
        lines=6,
        max_lines=18,
        elem_id="text",
    )
    button = gr.Button("Predict", variant="primary", elem_id="predict")
    return text, button, gr.Dropdown(catalog.gpu_names(), label="GPU type", elem_id="gpu")


def _answer() -> list[Any]:
    """The panels, in the order in which `ask` fills them."""
    answer = gr.HTML(elem_id="answer", elem_classes="page")
    timeline = gr.HTML(elem_id="timeline", elem_classes="page")
    with gr.Accordion("Layer by layer", open=False):
        layers = gr.HTML(elem_classes="page")
    with gr.Accordion("What is sent between GPUs", open=False):
        communication = gr.HTML(elem_classes="page")
    with gr.Accordion("Assumptions, warnings, and what is not modelled", open=False):
        notes = gr.HTML(elem_classes="page")
    with gr.Accordion("The job as a file for the command line", open=False):
        job = gr.Code(language="yaml", label="job.yaml", interactive=False, max_lines=24)
    link = gr.HTML(elem_id="link", elem_classes="page")
    return [answer, timeline, layers, communication, notes, job, link]


def _search() -> tuple[gr.Number, gr.Button, gr.HTML]:
    """Over how many GPUs the job is laid out, the button that searches, and where its plans are shown."""
    spread = gr.Number(
        label="GPUs to spread it over",
        info="with its batch of one optimizer step; 0: those of the run",
        precision=0,
        minimum=0,
        elem_id="spread",
    )
    return spread, gr.Button("Search layouts", elem_id="search"), gr.HTML(elem_id="plans", elem_classes="page")


def _left_open() -> tuple[list[Any], list[Any]]:
    """What a configuration may not say: another model and versions, as text; GPUs of the run, host memory and GPUs of a
    node, as numbers."""
    num_gpus = gr.Number(label="GPUs of the whole run", info="--num-gpus", precision=0, minimum=0, elem_id="num_gpus")
    model = gr.Textbox(label="Another model", info="--model", elem_id="model", max_lines=1)
    versions = gr.Textbox(
        label="Versions",
        info="torch=2.9,transformers=4.45.2, or the tag of NVIDIA's PyTorch image: 26.04",
        elem_id="versions",
        max_lines=1,
    )
    with gr.Row():
        host_memory = gr.Number(
            label="Host memory of a node, GiB",
            info="--host-memory-gib",
            minimum=0,
            elem_id="host_memory_gib",
            min_width=120,
        )
        per_node = gr.Number(
            label="GPUs of a node",
            info="--gpus-per-node",
            precision=0,
            minimum=0,
            placeholder="8",
            elem_id="gpus_per_node",
            min_width=120,
        )
    return [model, versions], [num_gpus, host_memory, per_node]


def _knobs(rows: dict[str, tuple[str, list[str] | None]]) -> list[Any]:
    """A component for each knob, in rows of two."""
    found: list[Any] = []
    names = list(rows)
    for pair in (names[i : i + 2] for i in range(0, len(names), 2)):
        with gr.Row():
            found += [_knob(name, *rows[name]) for name in pair]
    return found


def _knob(name: str, label: str, choices: list[str] | None) -> Any:
    common: dict[str, Any] = {"label": label, "elem_id": name, "min_width": 120}
    if choices is None:
        return gr.Number(precision=0, minimum=0, placeholder="as given", **common)
    return gr.Dropdown([("as given", AS_GIVEN), *((c, c) for c in choices)], value=AS_GIVEN, **common)
