"""Connections between tasks: authentication, frames, messages and the client of the servers."""
