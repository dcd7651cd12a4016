"""LitGPT's YAML."""
