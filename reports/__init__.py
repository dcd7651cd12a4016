"""Accuracy reports: an `Evaluation` as tables, plots and pages. They are made from stored rows only."""
