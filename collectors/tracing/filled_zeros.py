"""Gradients that autograd writes into zeros.

The backward of `max`, `topk`, `sort`, `gather`, indexing, `index_select`, `masked_select` and `take` makes zeros of the
input's size and fills them in place. But while a dispatch mode is on, as in a trace, autograd takes every tensor for a
subclass and fills a second tensor of that size (torch 2.13 `FunctionsManual.cpp` and `TensorAdvancedIndexing.cpp`,
`areAnyTensorSubclassLike`). No run on a GPU has that second tensor.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten
INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
"""What autograd runs while a mode is on, and what it runs in its place on plain tensors."""
MAKES_ZEROS = (aten.new_zeros.default, aten.zeros_like.default)
"""What makes the zeros, immediately before."""
