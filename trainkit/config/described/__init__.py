"""What each key of the config is: type, unit, default, meaning and tag, read from the code that takes it."""
