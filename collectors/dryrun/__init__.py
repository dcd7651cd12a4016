"""Runs a user's own training script, unmodified, on fake CUDA tensors until its third optimizer step has ended."""
