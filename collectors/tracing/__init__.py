"""Traces: the real training step of the real library on fake `cuda` tensors, with no GPU and no data."""
