"""Describe each key of the config: type, unit, default, meaning and tag, read from the code that takes it."""
