"""Alerts: what happened in a run calls a command or a webhook."""
