"""`peakcast search`: which layouts, batches and sequences fit, ranked. It may import all other packages."""
