"""The tensors of each adapter method: what it stores on projections and on the network, and what autograd saves in its
forward.

Source: peft 0.21 tuners/*/layer.py, named in each entry. Checked against peft's own modules, tensor by tensor and saved
tensor by saved tensor, in `tests/models/ledger/test_adapter_methods.py`. LoRA's own forward is in `builder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from peakcast.core.units import FP32, INT64
from peakcast.jobs.adapter_settings import settings_of
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning
from peakcast.models.ledger.parameters.adapter_parts import AdapterSaves, Made, Matrix

OnNetwork = Callable[[Architecture, Mapping[str, Any], list[Matrix]], list[Made]]


class AdapterMethod(NamedTuple):
    """One method."""

    on_matrix: Callable[[Matrix], list[Made]] = lambda matrix: []
    keeps: Callable[[Matrix, int], AdapterSaves] = lambda matrix, rows: AdapterSaves()
    """(matrix, rows = number of tokens) -> what autograd saves for this projection."""
    on_network: OnNetwork | None = None
    """Tensors that exist once for the network, given the settings and the adapted projections in the order of the
    network."""
    virtual_tokens: bool = False
    """Whether it puts tokens in front of every sequence."""


def matrix_of(tuning: Finetuning, name: str, shape: tuple[int, ...], layer: int = 0) -> Matrix:
    """The projection `name` of `shape` (out, in) as `tuning` adapts it."""
    rows_out, columns_in = shape
    return Matrix(name, rows_out, columns_in, tuning.rank or 0, settings_of(tuning.method, tuning.settings), layer)


def virtual_tokens(tuning: Finetuning) -> int:
    """Number of tokens that the method puts in front of every sequence."""
    if tuning.method == "full" or not METHODS[tuning.method].virtual_tokens:
        return 0
    return int(settings_of(tuning.method, tuning.settings)["num_virtual_tokens"])


def _low_rank(a: str, b: str) -> Callable[[Matrix], list[Made]]:
    """Two low-rank factors with the names `a` and `b`."""
    return lambda m: [Made(a, (m.rank, m.columns_in)), Made(b, (m.rows_out, m.rank))]


def _chain(m: Matrix, rows: int) -> AdapterSaves:
    """An input in the adapter's dtype, and its product with the first factor."""
    return AdapterSaves((rows * m.columns_in, rows * m.rank))


def _change(m: Matrix, rows: int) -> AdapterSaves:
    """The whole change of the weight, and an input in the adapter's dtype, which it multiplies."""
    return AdapterSaves((m.rows_out * m.columns_in, rows * m.columns_in))


# -- methods, by the alphabet -------------------------------------------------------------------------------------------


def _adaption_prompt(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """For each of the last layers a prompt and its gate, in the weights' dtype (tuners/adaption_prompt/layer.py)."""
    layers, width = settings["adapter_layers"] or architecture.num_hidden_layers, architecture.hidden_size
    one = [Made("adaption_prompt", (1, settings["adapter_len"], width)), Made("adaption_gate", (1,))]
    return one * min(int(layers), architecture.num_hidden_layers)


def _boft(m: Matrix) -> list[Made]:
    size = m.settings["boft_block_size"] or m.columns_in // m.settings["boft_block_num"]
    layers, blocks = m.settings["boft_n_butterfly_factor"], m.columns_in // size
    return [
        Made("boft_R", (layers, blocks, size, size)),
        Made("boft_s", (m.rows_out, 1)),
        Made("boft_P", (layers, m.columns_in, m.columns_in), trains=False, element_bytes=FP32),
    ]


def _boft_keeps(m: Matrix, rows: int) -> AdapterSaves:
    (_, blocks, size, _), square = _boft(m)[0].shape, m.columns_in**2
    return AdapterSaves((blocks * size * size,) * 3, (square,) * 3, inputs=True, result=True)


def _bone(m: Matrix) -> list[Made]:
    if m.settings["init_weights"] == "bat":
        return [Made("miss_block", (m.rows_out // m.rank, m.rank, m.rank))]
    columns = m.settings["mini_r"] if m.settings["init_weights"] == "mini" else m.rows_out
    return [Made("miss_block", (m.rank, columns))]


def _bone_keeps(m: Matrix, rows: int) -> AdapterSaves:
    if m.settings["init_weights"] == "bat":
        return AdapterSaves((m.rows_out * m.columns_in, m.rows_out * m.columns_in, rows * m.columns_in))
    expanded = (m.rank * m.rows_out,) if m.settings["init_weights"] == "mini" else ()
    return AdapterSaves((*expanded, rows * m.rank))


def _c3a(m: Matrix) -> list[Made]:
    size = m.settings["block_size"]
    return [Made("c3a_kernel", (m.rows_out // size, m.columns_in // size, size))]


def _delora(m: Matrix) -> list[Made]:
    norms = Made("delora_w_norm", (m.columns_in,), trains=False, element_bytes=FP32)
    return [*_low_rank("delora_A", "delora_B")(m), Made("delora_lambda", (1,)), norms]


def _glora(m: Matrix) -> list[Made]:
    """Paths A and B change the weight by products with it; C, D and E change the bias. A constant path trains nothing."""
    square = {
        "lora": [Made("Xd", (m.rows_out, m.rank)), Made("Xu", (m.rank, m.columns_in))],
        "vector": [Made("X", (m.rows_out, 1))],
        "constant": [],
    }
    return [*square[m.settings["config_A_B"]], *square[m.settings["config_A_B"]]]


def _gralora(m: Matrix) -> list[Made]:
    parts, general = m.settings["gralora_k"], m.settings["hybrid_r"]
    rank, blocks = m.rank, (m.columns_in // parts, m.rows_out // parts)
    made = [Made("gralora_A", (parts, blocks[0], rank)), Made("gralora_B", (parts, rank, blocks[1]))]
    whole = [Made("gralora_A_general", (general, m.columns_in)), Made("gralora_B_general", (m.rows_out, general))]
    return [*made, *(whole if general else [])]


def _ia3(m: Matrix) -> list[Made]:
    fed = m.name.rsplit(".", 1)[-1] in (m.settings["feedforward_modules"] or ("down_proj",))
    return [Made("ia3_l", (1, m.columns_in) if fed else (m.rows_out, 1))]


def _ia3_keeps(m: Matrix, rows: int) -> AdapterSaves:
    (scales,) = _ia3(m)
    one_row = scales.shape[0] == 1
    return AdapterSaves((m.columns_in, rows * m.columns_in)) if one_row else AdapterSaves((m.rows_out,), result=True)


def _lily(m: Matrix) -> list[Made]:
    """Each `stride_A` layers share one A, and all layers share the Bs (`_lily_network`)."""
    own = [Made("lily_router", (m.settings["num_B"], m.rank))]
    return own + ([Made("lily_A", (m.rank, m.columns_in))] if m.layer % m.settings["stride_A"] == 0 else [])


def _lily_network(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    first = {m.name.rsplit(".", 1)[-1]: m for m in reversed(matrices)}
    return [Made(f"{name}.lily_B", (m.settings["num_B"] * m.rank, m.rows_out)) for name, m in first.items()]


def _lokr(m: Matrix) -> list[Made]:
    """A Kronecker product of two matrices. The second is low-rank if that is smaller; so is the first if the settings ask
    for it."""
    factor = m.settings["decompose_factor"]
    (out_small, out_large), (in_small, in_large) = factors(m.rows_out, factor), factors(m.columns_in, factor)
    split = m.settings["decompose_both"] and m.rank < max(out_small, in_small) / 2
    first = _pair("lokr_w1", out_small, in_small, m.rank) if split else [Made("lokr_w1", (out_small, in_small))]
    low = m.rank < max(out_large, in_large) / 2
    second = _pair("lokr_w2", out_large, in_large, m.rank) if low else [Made("lokr_w2", (out_large, in_large))]
    return [*first, *second]


def _pair(name: str, rows: int, columns: int, rank: int) -> list[Made]:
    return [Made(f"{name}_a", (rows, rank)), Made(f"{name}_b", (rank, columns))]


def factors(number: int, factor: int) -> tuple[int, int]:
    """Two factors of `number`, the smaller first: `factor` and the rest, or, with -1, the two nearest to its square root
    (peft 0.21 tuners/lokr/layer.py `factorization`)."""
    if factor > 0 and number % factor == 0:
        return factor, number // factor
    most, found = number if factor == -1 else factor, (1, number)
    for small in range(2, math.isqrt(number) + 1):
        if number % small == 0 and small <= most:
            found = small, number // small
    return found


def _ln_tuning(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """A trained copy of every norm of the residual stream, in the weights' dtype (tuners/ln_tuning/layer.py)."""
    parts = ("weight", "bias") if architecture.normalization == "layernorm" else ("weight",)
    norms = 2 * architecture.num_hidden_layers + 1
    return [Made(f"norm.{part}", (architecture.hidden_size,)) for _ in range(norms) for part in parts]


def _oft(m: Matrix) -> list[Made]:
    """Blocks of a rotation of the input, each stored as its upper triangle: `rank` blocks, or blocks of
    `oft_block_size`."""
    size = m.settings["oft_block_size"] if not m.rank else m.columns_in // m.rank
    triangle, blocks = size * (size - 1) // 2, m.columns_in // size
    indices = [Made(name, (triangle,), trains=False, element_bytes=INT64) for name in ("oft_R.rows", "oft_R.cols")]
    return [Made("oft_R.weight", (blocks, triangle)), *indices]


def _oft_keeps(m: Matrix, rows: int) -> AdapterSaves:
    size = m.settings["oft_block_size"] if not m.rank else m.columns_in // m.rank
    return AdapterSaves((m.columns_in * size,) * 4 + (rows * m.columns_in,))


def _prompts(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    return [Made("prompt_encoder.embedding", (settings["num_virtual_tokens"], architecture.hidden_size))]


def _p_tuning(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """Prompts that pass through a perceptron of three layers (tuners/p_tuning/model.py, MLP)."""
    width = architecture.hidden_size
    inner = int(settings["encoder_hidden_size"] or width)
    sides = ((inner, width), (inner, inner), (width, inner))
    mlp = [Made(f"mlp_head.{n}", shape) for n, side in enumerate(sides) for shape in (side, side[:1])]
    return [*_prompts(architecture, settings, matrices), *mlp]


def _prefix_tuning(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """Keys and values of every layer for the prefix's tokens, stored directly or computed by a perceptron."""
    token = architecture.num_key_value_heads * architecture.head_dim
    tokens, out = settings["num_virtual_tokens"], 2 * architecture.num_hidden_layers * token
    if not settings["prefix_projection"]:
        return [Made("prompt_encoder.embedding", (tokens, out))]
    inner = int(settings["encoder_hidden_size"] or token)
    sides = ((inner, token), (out, inner))
    mlp = [Made(f"transform.{n}", shape) for n, side in enumerate(sides) for shape in (side, side[:1])]
    return [Made("prompt_encoder.embedding", (tokens, token)), *mlp]


def _randlora(m: Matrix) -> list[Made]:
    least = min(m.rows_out, m.columns_in)
    bases = -(-least // m.rank)
    return [Made("randlora_lambda", (m.rank, bases)), Made("randlora_gamma", (bases, least))]


def _randlora_keeps(m: Matrix, rows: int) -> AdapterSaves:
    least = min(m.rows_out, m.columns_in)
    return AdapterSaves((least * least, rows * least))


def _randlora_network(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """Random bases for all projections, which do not train."""
    rank, longest = matrices[0].rank, max(max(m.rows_out, m.columns_in) for m in matrices)
    least = max(min(m.rows_out, m.columns_in) for m in matrices)
    bases = -(-least // rank)
    return [
        Made("randlora_A", (rank, 1, least), trains=False, element_bytes=FP32),
        Made("randlora_B", (longest, bases, rank), trains=False, element_bytes=FP32),
    ]


def _road(m: Matrix) -> list[Made]:
    size = {"road_1": m.rows_out // 2, "road_2": m.rows_out, "road_4": 2 * m.rows_out}[m.settings["variant"]]
    return [Made("road_theta", (size,)), Made("road_alpha", (size,))]


def _shira(m: Matrix) -> list[Made]:
    number = m.rank * (m.rows_out + m.columns_in)
    return [Made("shira_weight", (number,)), Made("shira_indices", (2, number), trains=False, element_bytes=INT64)]


def _spectrum(name: str) -> Callable[[Matrix], list[Made]]:
    """Coefficients of a transformed weight, and their positions."""

    def made(m: Matrix) -> list[Made]:
        number = m.settings["n_frequency"]
        return [Made(name, (number,)), Made("indices", (2, number), trains=False, element_bytes=INT64)]

    return made


def _waveft_keeps(m: Matrix, rows: int) -> AdapterSaves:
    return AdapterSaves((m.rows_out * m.columns_in, m.rows_out * m.columns_in, rows * m.columns_in))


def _unilora(m: Matrix) -> list[Made]:
    """Every element of a LoRA is one of a few trained numbers, times a scale."""
    sides = (m.rank, m.columns_in), (m.rows_out, m.rank)
    kinds = (("indices", INT64), ("scales", FP32))
    return [Made(f"unilora_{kind}", side, trains=False, element_bytes=size) for kind, size in kinds for side in sides]


def _vblora(m: Matrix) -> list[Made]:
    """Logits that choose each part of a LoRA's vectors from a bank."""
    vectors, length = m.settings["num_vectors"], m.settings["vector_length"]
    a, b = (m.rank, m.columns_in // length, vectors), (m.rows_out // length, m.rank, vectors)
    return [Made("vblora_logits_A", a), Made("vblora_logits_B", b)]


def _vblora_keeps(m: Matrix, rows: int) -> AdapterSaves:
    a, b = m.rank * m.columns_in, m.rank * m.rows_out
    chosen = m.settings["topk"]
    return AdapterSaves((chosen * a, chosen * b, a, b, *_chain(m, rows).wide))


def _vera_network(architecture: Architecture, settings: Mapping[str, Any], matrices: list[Matrix]) -> list[Made]:
    """One pair of random matrices, as large as the largest projection's sides, that all layers share."""
    wide, tall, rank = max(m.columns_in for m in matrices), max(m.rows_out for m in matrices), matrices[0].rank
    return [
        Made("vera_A", (rank, wide), trains=False, element_bytes=FP32),
        Made("vera_B", (tall, rank), trains=False, element_bytes=FP32),
    ]


_LORA = AdapterMethod(_low_rank("lora_A", "lora_B"))
METHODS: Mapping[str, AdapterMethod] = {
    "lora": _LORA,
    "qlora": _LORA,
    "lora_fa": AdapterMethod(
        lambda m: [Made("lora_A", (m.rank, m.columns_in), trains=False), Made("lora_B", (m.rows_out, m.rank))],
        lambda m, rows: AdapterSaves((rows * m.rank,)),
    ),
    "dora": AdapterMethod(
        lambda m: [*_LORA.on_matrix(m), Made("lora_magnitude_vector", (m.rows_out,))],
        lambda m, rows: AdapterSaves((*_chain(m, rows).wide, rows * m.rows_out, m.rows_out, m.rows_out), result=True),
    ),
    "adalora": AdapterMethod(
        lambda m: [*_LORA.on_matrix(m), Made("lora_E", (m.rank, 1)), Made("ranknum", (1,), trains=False)],
        lambda m, rows: AdapterSaves((m.columns_in * m.rank, *_chain(m, rows).wide, rows * m.rows_out)),
    ),
    "adaption_prompt": AdapterMethod(on_network=_adaption_prompt),
    "beft": AdapterMethod(lambda m: [Made("beft_bias", (1, m.rows_out))]),
    "boft": AdapterMethod(_boft, _boft_keeps),
    "bone": AdapterMethod(_bone, _bone_keeps),
    "c3a": AdapterMethod(_c3a, lambda m, rows: AdapterSaves((rows * m.columns_in,))),
    "delora": AdapterMethod(_delora, lambda m, rows: AdapterSaves((*_chain(m, rows).wide, rows * m.rank))),
    "fourierft": AdapterMethod(_spectrum("fourierft_spectrum"), _change),
    "glora": AdapterMethod(_glora, lambda m, rows: AdapterSaves(narrow=(m.rows_out * m.columns_in,), inputs=True)),
    "gralora": AdapterMethod(
        _gralora, lambda m, rows: AdapterSaves((rows * m.columns_in, rows * m.rank * m.settings["gralora_k"]))
    ),
    "hira": AdapterMethod(_low_rank("hira_A", "hira_B"), _change),
    "hra": AdapterMethod(
        lambda m: [Made("hra_u", (m.columns_in, m.rank))],
        lambda m, rows: AdapterSaves(
            (*(m.columns_in**2,) * (m.rank + 1), *(m.rows_out * m.columns_in,) * 2, rows * m.columns_in)
        ),
    ),
    "ia3": AdapterMethod(_ia3, _ia3_keeps),
    "lily": AdapterMethod(
        _lily, lambda m, rows: AdapterSaves((*_chain(m, rows).wide, m.rank * m.rows_out)), on_network=_lily_network
    ),
    "ln_tuning": AdapterMethod(on_network=_ln_tuning),
    "loha": AdapterMethod(
        lambda m: [
            *_pair("hada_w1", m.rows_out, m.columns_in, m.rank),
            *_pair("hada_w2", m.rows_out, m.columns_in, m.rank),
        ],
        _change,
    ),
    "lokr": AdapterMethod(_lokr, _change),
    "miss": AdapterMethod(_bone, _bone_keeps),
    "oft": AdapterMethod(_oft, _oft_keeps),
    "p_tuning": AdapterMethod(on_network=_p_tuning, virtual_tokens=True),
    "prefix_tuning": AdapterMethod(on_network=_prefix_tuning),
    "prompt_tuning": AdapterMethod(on_network=_prompts, virtual_tokens=True),
    "randlora": AdapterMethod(_randlora, _randlora_keeps, _randlora_network),
    "road": AdapterMethod(_road, lambda m, rows: AdapterSaves((m.rows_out,) * 6 + (rows * m.rows_out,) * 2)),
    "shira": AdapterMethod(_shira, lambda m, rows: AdapterSaves(narrow=(m.rows_out * m.columns_in,), inputs=True)),
    "trainable_tokens": AdapterMethod(
        on_network=lambda architecture, settings, matrices: [
            Made("trainable_tokens_delta", (settings["num_tokens"], architecture.hidden_size))
        ]
    ),
    "unilora": AdapterMethod(
        _unilora,
        lambda m, rows: AdapterSaves((m.columns_in * m.rank, *_chain(m, rows).wide, m.rank * m.rows_out)),
        lambda architecture, settings, matrices: [Made("unilora_theta_d", (settings["theta_d_length"],))],
    ),
    "vblora": AdapterMethod(
        _vblora,
        _vblora_keeps,
        lambda architecture, settings, matrices: [
            Made("vblora_vector_bank", (settings["num_vectors"], settings["vector_length"]))
        ],
    ),
    "vera": AdapterMethod(
        lambda m: [Made("vera_lambda_b", (m.rows_out,)), Made("vera_lambda_d", (m.rank,))],
        lambda m, rows: AdapterSaves((rows * m.rank, rows * m.rows_out)),
        _vera_network,
    ),
    "waveft": AdapterMethod(_spectrum("waveft_spectrum"), _waveft_keeps),
}
ON_NETWORK = ("adaption_prompt", "ln_tuning", "p_tuning", "prefix_tuning", "prompt_tuning", "trainable_tokens")
"""Methods that adapt no projection."""
