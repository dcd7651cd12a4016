"""The ledger: every tensor of a training step in closed form, on the same timeline as the trace and the snapshot."""
