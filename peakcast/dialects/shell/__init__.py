"""Shell scripts that launch a training run."""
