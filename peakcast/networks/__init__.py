"""Hugging Face model families: what each differs in, and what its config.json says of a network."""
