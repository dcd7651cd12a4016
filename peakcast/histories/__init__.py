"""What PyTorch's CUDA allocator recorded of real runs: the type, and readers of the files that hold it."""
