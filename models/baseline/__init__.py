"""The analytical baseline of every quantity: timelines, their replay, and what lies outside PyTorch's allocator."""
