"""Values that are secrets: which keys hold one, and references to environment variables in their place."""
