"""What everything is built on: units, errors, files that survive a crash, bounded reading, processes. Nothing of
training."""
