"""Partition a model into blocks, and place them on devices or pipeline stages."""
