"""Evaluate or predict with a trained model, under any strategy: one job over the processes of this machine."""
