"""The step of Megatron-LM on one rank."""
