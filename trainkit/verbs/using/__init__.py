"""Verbs that use trained models."""
