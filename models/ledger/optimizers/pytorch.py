"""torch.optim, read in torch 2.13 `torch/optim/*.py` (the same since 2.1 where where-memory-goes D says so) and traced."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from peakcast.core.units import BF16
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options, Sized, States, TrainedTensor, copies
from peakcast.models.ledger.tape.local_variables import Locals

STEP_BYTES = 4
"""A fused optimizer counts its steps in a tensor on the GPU, one per parameter; the others count on the CPU."""


def _fused_states(*names: str) -> States:
    """_init_group with fused: the step count is on the device too; the update is one kernel."""
    made = copies(*names)
    return lambda tensor, options: [*made(tensor, options), ("step", STEP_BYTES)]


def _take_gradients(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """An operation that reads the gradients of `group`. If a gradient is whole while its parameter is split, DTensor first
    copies this rank's part; if each rank has a partial sum, DTensor first adds them up (torch 2.13
    distributed/tensor/_dispatch.py `redistribute_local_args`). Rules whose peak is at another operation leave this out."""
    if parts := [tensor.num_bytes for tensor in group if tensor.copies_gradient]:
        run.let("gradient.part", *parts)
        run.free("gradient.part")


def _decay(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """Coupled weight decay: grads = torch._foreach_add(grads, params, alpha=weight_decay), or grad = grad.add(...) for one
    parameter after the other, whose variable keeps the copy until the next. Hugging Face's second group does not decay."""
    if options.decays_gradients and (group[0].decays or not options.trainer):
        run.let("grads", *(tensor.num_bytes for tensor in group))


def _loop_adam(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_single_tensor_adam: denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)."""
    for tensor in group:
        run.free("grads")
        _decay(run, [tensor], options)
        run.let("square_root", tensor.num_bytes)
        run.let("denominator", tensor.num_bytes)
        run.free("square_root")


def _momentum(tensor: TrainedTensor, options: Options) -> list[Sized]:
    return [("momentum_buffer", tensor.num_bytes * tensor.gradient_parts)] if options.momentum > 0 else []


def _loop_sgd(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_single_tensor_sgd: tensor by tensor; the first step makes the buffers."""
    for tensor in group:
        run.make_states()
        run.free("grads")
        _decay(run, [tensor], options)
        run.let("gradient.part", *([tensor.num_bytes] if tensor.copies_gradient else []))
        run.free("gradient.part")


def _foreach_sgd(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_multi_tensor_sgd: in place, but for coupled weight decay."""
    _decay(run, group, options)
    _take_gradients(run, group, options)


def _foreach_root(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_multi_tensor_adam: torch._foreach_addcmul_(exp_avg_sqs, grads, grads) reads gradients twice; exp_avg_sq_sqrt =
    torch._foreach_sqrt(exp_avg_sqs) is a copy of the group until the function returns. In torch 2.0 so is denom =
    torch._foreach_add(exp_avg_sq_sqrt, eps)."""
    _decay(run, group, options)
    _take_gradients(run, [*group, *group], options)
    run.free("grads")  # "del device_grads, scaled_device_grads"
    run.let("exp_avg_sq_sqrt", *(tensor.num_bytes for tensor in group))
    if not options.adds_epsilon_in_place:
        run.let("denom", *(tensor.num_bytes for tensor in group))


def _foreach_rmsprop(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_multi_tensor_rmsprop: avg = torch._foreach_sqrt(square_avgs), which divides the gradients."""
    _decay(run, group, options)
    run.let("avg", *(tensor.num_bytes for tensor in group))
    _take_gradients(run, group, options)


def _foreach_adagrad(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_multi_tensor_adagrad: std, and the numerator, a multiple of the gradients (with coupled weight decay that copy)."""
    run.let("std", *(tensor.num_bytes for tensor in group))
    run.let("numerator", *(tensor.num_bytes * tensor.gradient_parts for tensor in group))
    _take_gradients(run, group, options)


def _loop_root(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_single_tensor_rmsprop, _single_tensor_adagrad: avg = square_avg.sqrt().add_(eps)."""
    for tensor in group:
        run.free("grads")
        _decay(run, [tensor], options)
        run.let("square_root", tensor.num_bytes)
        _take_gradients(run, [tensor], options)


def _factored(tensor: TrainedTensor, options: Options) -> list[Sized]:
    if len(tensor.shape) < 2:
        return [("variance", tensor.num_bytes)]
    *leading, rows, columns = tensor.shape
    stacked = prod(leading) * tensor.element_bytes
    return [("row_var", stacked * rows), ("col_var", stacked * columns)]


def _loop_adafactor(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_single_tensor_adafactor: var_estimate = row_var @ col_var, which becomes the update in place; for a vector also the
    squared gradient."""
    for tensor in group:
        if len(tensor.shape) > 1:
            for name, size in _factored(tensor, options):
                run.let(name.replace("var", "mean"), size)
        else:
            run.let("grad_squared", tensor.num_bytes)
        run.let("update", tensor.num_bytes)


def _foreach_adafactor(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_multi_tensor_adafactor: first matrices, then vectors, each with a list of estimates. The matrices' list is freed
    only when the vectors' list exists."""
    matrices = [tensor for tensor in group if len(tensor.shape) > 1]
    vectors = [tensor for tensor in group if len(tensor.shape) == 1]
    if matrices:
        for index, name in enumerate(("row_means", "col_means")):
            run.let(name, *(_factored(tensor, options)[index][1] for tensor in matrices))
            run.free(name)
        run.let("updates", *(tensor.num_bytes for tensor in matrices))
    if vectors:
        run.let("grads_squared", *(tensor.num_bytes for tensor in vectors))
        run.free("grads_squared")
        run.let("updates", *(tensor.num_bytes for tensor in vectors))


def _muon(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """_single_tensor_muon and _zeropower_via_newtonschulz: the Nesterov update, then five iterations in bf16. The second
    has all that ever exists at once: the update, the matrix before and after, and two Gram matrices."""
    for tensor in group:
        gram = min(tensor.shape) ** 2 * BF16
        run.let("update", tensor.num_bytes)
        if tensor.element_bytes != BF16:
            run.let("orthogonalized", tensor.numel * BF16)
        for _ in range(2):
            run.let("gram_matrix", gram)
            run.let("gram_update", gram)
            run.let("orthogonalized", tensor.numel * BF16)
        run.free("gram_matrix", "gram_update")
        run.rename("orthogonalized", "update")


ADAM = "torch 2.13 optim/adam.py"
SGD = "torch 2.13 optim/sgd.py: in place; the buffer is a clone of the first gradient"
_sgd = OptimizerRule(SGD, _momentum, _take_gradients)
_adam = {
    "fused": OptimizerRule(f"{ADAM} _fused_adam", _fused_states("exp_avg", "exp_avg_sq"), _take_gradients),
    "foreach": OptimizerRule(f"{ADAM} _multi_tensor_adam", copies("exp_avg", "exp_avg_sq"), _foreach_root),
    "loop": OptimizerRule(f"{ADAM} _single_tensor_adam", copies("exp_avg", "exp_avg_sq"), _loop_adam),
}
_ADAFACTOR = "torch 2.13 optim/_adafactor.py"
_ADAGRAD = "torch 2.13 optim/adagrad.py: the sums are made with the optimizer"
_RMSPROP = "torch 2.13 optim/rmsprop.py"

RULES: dict[tuple[str, str], OptimizerRule] = {
    **{(name, implementation): rule for name in ("adamw", "adam") for implementation, rule in _adam.items()},
    ("sgd", "fused"): _sgd,
    ("sgd", "foreach"): OptimizerRule(SGD, _momentum, _foreach_sgd),
    ("sgd", "loop"): OptimizerRule(SGD, _momentum, _loop_sgd),
    ("adafactor", "foreach"): OptimizerRule(f"{_ADAFACTOR} _multi_tensor_adafactor", _factored, _foreach_adafactor),
    ("adafactor", "loop"): OptimizerRule(f"{_ADAFACTOR} _single_tensor_adafactor", _factored, _loop_adafactor),
    ("adagrad", "fused"): OptimizerRule(_ADAGRAD, _fused_states("sum"), built_with_optimizer=True),
    ("adagrad", "foreach"): OptimizerRule(_ADAGRAD, copies("sum"), _foreach_adagrad, built_with_optimizer=True),
    ("adagrad", "loop"): OptimizerRule(_ADAGRAD, copies("sum"), _loop_root, built_with_optimizer=True),
    ("rmsprop", "foreach"): OptimizerRule(_RMSPROP, copies("square_avg"), _foreach_rmsprop),
    ("rmsprop", "loop"): OptimizerRule(_RMSPROP, copies("square_avg"), _loop_root),
    ("muon", ""): OptimizerRule(
        "torch 2.13 optim/_muon.py; AdamW updates what is not a matrix, as its documentation shows",
        copies("momentum_buffer"),
        _muon,
        takes=lambda tensor: len(tensor.shape) == 2,
    ),
}
"""(name, implementation) -> rule. An optimizer with only one implementation has it under ""."""
