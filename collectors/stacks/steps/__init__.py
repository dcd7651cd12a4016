"""Training steps phase by phase, and who follows them."""
