"""Measure trainings on this machine: the same training under several choices, in turns."""
