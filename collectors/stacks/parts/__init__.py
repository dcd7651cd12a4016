"""Parts of a stack that several of its layouts share."""
