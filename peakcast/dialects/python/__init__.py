"""Reads Python programs as text: their calls and the values of the arguments. Nothing is run."""
