"""Record one forward pass of a model, and run parts of it as stages."""
