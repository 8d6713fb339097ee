"""Advice: the legal ways to train a config on some devices, each planned, and the best of them."""
