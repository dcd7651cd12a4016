"""A callback of transformers' Trainer that reports the first forward, every larger batch, and the end of training."""

from __future__ import annotations

from typing import Any, Protocol

import transformers

from peakcast.collectors.stacks.steps.observing import shape_of_call


class TrainerListener(Protocol):
    """Receives what the callback reports."""

    def begins(self, facts: dict[str, Any]) -> None:
        """Training begins, before the first step. `facts`: `training_arguments`, `config`, `peft` and `deepspeed` as
        mappings (the last two or None), `num_gpus`, and `arguments_class`, the class of the arguments."""

    def sees(self, batch: int, sequence: int) -> None:
        """The model is about to be called with a batch larger than any before."""

    def ends(self, num_steps: int) -> None:
        """Training has ended."""


class TellingCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports to a `TrainerListener`. Add it to a Trainer's `callbacks`."""

    def __init__(self, listener: TrainerListener) -> None:
        self._listener = listener
        self._largest = 0
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what is trained, and hook into the model's calls."""
        model = kwargs["model"]
        peft = getattr(model, "peft_config", None)
        engine = getattr(args, "hf_deepspeed_config", None)  # "auto" values are filled in by now
        self._listener.begins(
            {
                "training_arguments": {
                    **{key: value for key, value in args.to_dict().items() if key != "deepspeed"},
                    "torch_dtype": str(model.dtype).removeprefix("torch."),
                },
                "config": model.config.to_dict(),
                "peft": next(iter(peft.values())).to_dict() if peft else None,
                "deepspeed": engine.config if engine is not None else None,
                "num_gpus": int(args.world_size),
                "arguments_class": type(args),
            }
        )
        self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = shape_of_call(args, kwargs)
        if shape is not None and model.training and shape[0] * shape[1] > self._largest:
            self._largest = shape[0] * shape[1]
            self._listener.sees(*shape)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the end."""
        if self._hook is not None:
            self._hook.remove()
        self._listener.ends(int(state.global_step))
