"""Processes in which cells run: forked from a warm parent, side by side, or one for each rank."""
