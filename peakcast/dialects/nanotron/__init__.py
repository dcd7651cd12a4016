"""nanotron's YAML."""
