"""The tensors of a network before any step: parameters, adapters, quantised weights."""
