"""Data parallelism: a copy of the model on every device, whose gradients are summed each step."""
