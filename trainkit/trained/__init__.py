"""The trained model of a run: load, predict, generate, export and quantize it."""
