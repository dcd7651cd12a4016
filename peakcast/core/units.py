"""Units. Bytes are ints everywhere; GiB are for people: at the command line, in messages and in reports."""

KIB = 2**10
MIB = 2**20
GIB = 2**30

BOOL = FP8 = 1
BF16 = 2
FP32 = INT32 = 4
INT64 = 8
"""Bytes of one element, where code of a framework fixes the dtype. A dtype that a job names is looked up in DTYPE_BYTES."""

ALLOCATION_UNIT_BYTES = 512
"""kMinBlockSize of PyTorch's c10/core/AllocatorConfig.h: the size of every block is a multiple of it."""

DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
    "nf4": 0.5,
    "int4": 0.5,
}
"""Bytes of one element, by the dtype names of `spec.Precision`."""


def format_gib(num_bytes: float, digits: int = 2) -> str:
    """`num_bytes` in GiB for people, for example `'62.76 GiB'`."""
    return f"{num_bytes / GIB:,.{digits}f} GiB"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
