"""What a Hugging Face config.json says of a network, family by family."""
