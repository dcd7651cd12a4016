"""What the functions of `peakcast.api` do, one module per door; they put the other parts together."""
