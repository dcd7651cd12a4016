"""The question as a value: what is trained, how, and on how many ranks."""
