"""What a run is before it starts: plan, components, memory, and notes for the user."""
