"""A simulation of PyTorch's caching allocator, call by call, and replays of timelines and recordings through it."""
