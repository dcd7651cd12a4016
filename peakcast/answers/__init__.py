"""The answer as plain values: predictions, explanations, findings' words, and what `doctor` finds."""
