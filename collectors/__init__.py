"""Where measurements come from: real GPUs, traces without one, and what others published."""
