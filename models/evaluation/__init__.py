"""How accurate predictions are on what was not seen, and what follows from that."""
