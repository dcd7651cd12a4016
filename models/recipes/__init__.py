"""Recipes: what a network's blocks allocate, recorded from the library that runs them, for any batch, length and depth."""
