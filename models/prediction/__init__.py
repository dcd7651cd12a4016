"""Baseline, residual and bars put together, and whether the job fits."""
