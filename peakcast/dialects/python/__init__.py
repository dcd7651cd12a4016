"""Python programs as text: their calls and the values of their arguments; nothing is run."""
