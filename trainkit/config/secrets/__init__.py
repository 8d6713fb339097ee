"""Secrets of a config: which keys hold one, and references to environment variables in their place."""
