"""Runs the cells of a grid and records what each allocates."""
