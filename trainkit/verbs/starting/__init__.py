"""Verbs that write scripts to start a run elsewhere, or complete a command line."""
