"""Optimizers of other packages: transformers' Adafactor, lion-pytorch, GaLore, LOMO and AdaLomo."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from peakcast.core.units import FP32
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options, Sized, TrainedTensor, copies
from peakcast.models.ledger.tape.local_variables import Locals


def _factored_fp32(tensor: TrainedTensor, options: Options) -> list[Sized]:
    if len(tensor.shape) < 2:
        return [("exp_avg_sq", tensor.numel * FP32)]
    *leading, rows, columns = tensor.shape
    stacked = prod(leading) * FP32
    return [("exp_avg_sq_row", stacked * rows), ("exp_avg_sq_col", stacked * columns)]


def _adafactor_states(tensor: TrainedTensor, options: Options) -> list[Sized]:
    return [*_factored_fp32(tensor, options), ("RMS", FP32)]


def _adafactor(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """Adafactor.step, line by line: fp32 copies of a half-precision gradient and parameter, grad² and its sum with eps, the
    factored estimate that replaces it, and the negated update. `update` lives on into the next iteration."""
    for tensor in group:
        wide = tensor.numel * FP32
        run.free("grad", "p_data_fp32")
        if tensor.element_bytes < FP32:
            run.let("grad", wide)
        run.make_states()
        if tensor.element_bytes < FP32:
            run.let("p_data_fp32", wide)
        run.let("grad_squared", wide)
        run.let("update", wide)
        run.free("grad_squared")
        run.let("update", wide)
        run.let("negated", wide)
        run.free("negated")


def _lion(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """update_fn: exp_avg.clone().mul_(beta1).add(grad, ...).sgn_(), freed when the function returns."""
    for tensor in group:
        run.make_states()
        run.let("clone", tensor.num_bytes)
        run.let("update", tensor.num_bytes)
        run.free("clone", "update")


def _is_projected(tensor: TrainedTensor) -> bool:
    """Whether GaLore projects it; optim_target_modules="all-linear" means the weights of nn.Linear."""
    return len(tensor.shape) == 2 and not tensor.is_embedding


def _galore_shapes(tensor: TrainedTensor, rank: int) -> tuple[int, int]:
    """Elements of the projector and of a projected gradient; proj_type "std" projects the shorter side."""
    shorter, longer = sorted(tensor.shape)
    return shorter * min(rank, shorter), longer * min(rank, shorter)


def _galore_states(tensor: TrainedTensor, options: Options) -> list[Sized]:
    """The states of a tensor, and its projector if GaLore projects it."""
    if not _is_projected(tensor):
        return copies("exp_avg", "exp_avg_sq")(tensor, options)
    projector, projected = (numel * tensor.element_bytes for numel in _galore_shapes(tensor, options.rank))
    if tensor.element_bytes == FP32:
        projector = FP32 * min(tensor.shape) ** 2  # a view that keeps all of Vh, or all of U
    return [("projector", projector), ("exp_avg", projected), ("exp_avg_sq", projected)]


def _galore(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """GaLoreAdamW.step: project, two quotients of the projected size, project back and scale. The first step (and every
    update_proj_gap-th) also decomposes an fp32 copy of the gradient into singular values."""
    for tensor in group:
        size = tensor.num_bytes
        run.free("grad")  # it now refers to the parameter's own gradient
        if _is_projected(tensor):
            if options.first_step:
                _decompose(run, tensor, options.rank)
            size = _galore_shapes(tensor, options.rank)[1] * tensor.element_bytes
            run.let("grad", size)
        run.make_states()
        run.let("denominator", size)
        run.let("norm_grad", size)
        if _is_projected(tensor):
            run.let("full_rank_grad", tensor.num_bytes)
            run.let("norm_grad", tensor.num_bytes)
            run.free("full_rank_grad")


def _decompose(run: Locals, tensor: TrainedTensor, rank: int) -> None:
    """GaLoreProjector.get_orthogonal_matrix: matrix, U, s, Vh and the discarded product, in fp32, then the factor."""
    shorter, longer = sorted(tensor.shape)
    kept = min(rank, shorter)
    factors = [longer * shorter * FP32, shorter * FP32]
    if tensor.element_bytes < FP32:  # else the third factor stays: it is the projector's state
        run.let("matrix", tensor.numel * FP32)
        factors.append(shorter * shorter * FP32)
    run.let("svd", *factors)
    run.let("diagonal", kept * kept * FP32)
    run.let("product", longer * kept * FP32)
    run.free("diagonal")
    if tensor.element_bytes < FP32:
        run.let("factor", shorter * kept * tensor.element_bytes)
    run.free("matrix", "svd", "product", "factor")


RULES: dict[tuple[str, str, str], OptimizerRule] = {
    ("adafactor", "transformers", ""): OptimizerRule(
        "transformers 5.17 optimization.py Adafactor (the same in 4.48)", _adafactor_states, _adafactor
    ),
    ("lion", "lion_pytorch", ""): OptimizerRule("lion-pytorch 0.2.5 lion_pytorch.py", copies("exp_avg"), _lion),
    ("galore", "galore_torch", ""): OptimizerRule(
        "galore-torch 1.0 adamw.py, galore_projector.py; transformers 5.17 trainer_optimizer.py _setup_low_rank_optimizer",
        _galore_states,
        _galore,
        groups=lambda tensors: [
            [tensor for tensor in tensors if not _is_projected(tensor)],
            [tensor for tensor in tensors if _is_projected(tensor)],
        ],
    ),
    ("lomo", "lomo_optim", ""): OptimizerRule(
        "lomo-optim 0.1.1 lomo.py fuse_update: fp32 copies of a half gradient and parameter",
        updates_in_backward="one_behind",
        update_fp32_copies=lambda element_bytes: 2 if element_bytes < FP32 else 1,
    ),
    ("adalomo", "lomo_optim", ""): OptimizerRule(
        "lomo-optim 0.1.1 adalomo.py fuse_update: grad_fp32, grad² and its sum with eps; later the update and p_fp32",
        _factored_fp32,
        built_with_optimizer=True,
        has_states_of_frozen=True,
        updates_in_backward="one_behind",
        update_fp32_copies=lambda element_bytes: 3,
    ),
}
"""(name, library, implementation) -> rule."""
