"""The step of Hugging Face transformers and plain PyTorch on one rank."""
