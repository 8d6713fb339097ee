"""Verbs that measure trainings, and predict what others would take."""
