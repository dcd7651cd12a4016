"""The commands, by what they are for: each parses, calls the function of `peakcast.api` of the same name, and prints."""
