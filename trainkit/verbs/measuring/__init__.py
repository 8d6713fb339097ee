"""Verbs that measure trainings, and predict the time and memory of others."""
