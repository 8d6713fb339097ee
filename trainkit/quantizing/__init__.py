"""Quantize a trained model by torchao: weights in 8 or 4 bits, or weights and activations in 8."""
