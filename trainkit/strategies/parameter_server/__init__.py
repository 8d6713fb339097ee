"""Parameter server: servers hold the variables, workers that may join and leave compute gradients."""
