"""Losses that are computed in the output layer of a model, from the hidden states."""
