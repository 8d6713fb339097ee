"""The plan of a run before it starts: components, memory, and notes for the user."""
