"""Keys of arguments are as different as those of torch, and no more."""

from __future__ import annotations

import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, _CacheKeyState

from peakcast.collectors.tracing.cache_keys import add_arguments


def test_arguments_have_equal_keys_where_torch_s_are_equal() -> None:
    with FakeTensorMode() as mode:
        one = torch.empty(4, 6)
        arguments: list[tuple[object, ...]] = [
            (one,),
            (torch.empty(4, 6),),
            (torch.empty(4, 6, device="meta"),),
            (torch.empty(4, 6, dtype=torch.float16),),
            (torch.empty(4, 6, requires_grad=True),),
            (torch.empty(6, 4).t(),),
            (torch.empty(8, 6)[:4],),
            (torch.empty(8, 6)[4:],),
            (torch.empty(4, 6, dtype=torch.complex64),),
            (torch.empty(4, 6, dtype=torch.complex64).conj(),),
            ([one],),
            ([one, one],),
            (one, one),
            (one, 1),
            (one, 1.0),
            (one, True),
            (one, None),
            (one, [1, 2]),
            (one, (1, 2)),
            (one, torch.float32),
            (one, {"a": 1}),
        ]
    state = _CacheKeyState(None)

    def own(args: tuple[object, ...]) -> tuple[object, ...]:
        key: list[object] = []
        add_arguments(mode, key, args, lambda some, rest: mode._prep_args_for_hash(some, rest, state, []))
        return tuple(key)

    def of_torch(args: tuple[object, ...]) -> tuple[object, ...]:
        key: list[object] = []
        mode._prep_args_for_hash(key, args, state, [])
        return tuple(key)

    for first, second in itertools.combinations(arguments, 2):
        assert (own(first) == own(second)) is (of_torch(first) == of_torch(second))
    assert own(arguments[0]) == own(arguments[1])
