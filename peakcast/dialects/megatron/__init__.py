"""Megatron-LM's arguments and YAML."""
