"""Accuracy reports: what an `Evaluation` says, as tables, plots and pages. Built from stored rows alone."""
