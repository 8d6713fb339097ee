"""Trackers: Trackio, Weights & Biases and MLflow, sent from the run folder by a process of their own."""
