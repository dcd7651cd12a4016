"""Recorded networks on a step: which jobs they cover, and their blocks under every layout."""
