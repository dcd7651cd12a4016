"""What measurements show beyond the baseline, and error bars: fitted, kept as JSON (here, one file per GPU type),
applied."""
