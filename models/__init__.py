"""The models: an analytical baseline (every tensor of a step, on a timeline) plus a learned residual with error bars."""
