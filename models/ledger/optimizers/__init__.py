"""What each optimizer keeps and what its step allocates, one file per library or family."""
