"""Collectors: run short training steps of real libraries and record what they allocate; or trace them without a GPU."""
