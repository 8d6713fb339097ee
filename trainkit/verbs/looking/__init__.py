"""Verbs that start no training: they show planned and past runs."""
