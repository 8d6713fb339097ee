"""Commands that start nothing: they show what would run and what has run."""
