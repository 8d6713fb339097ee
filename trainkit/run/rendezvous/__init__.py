"""Processes that an external launcher has started: rendezvous, agreement, late joining, and shutdown."""
