"""The commands, grouped by purpose. Each parses its arguments, calls the function of `peakcast.api` of the same name, and
prints."""
