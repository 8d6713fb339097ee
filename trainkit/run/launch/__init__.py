"""Ways to start a run that are neither an agent alone nor an external launch."""
