"""The one idea of peakcast, the tensors of a step over its instants, and the files that hold it."""
