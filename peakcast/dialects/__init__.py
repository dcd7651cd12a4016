"""Configurations as other projects write them, translated into a `TrainingJob`: one module per dialect."""
