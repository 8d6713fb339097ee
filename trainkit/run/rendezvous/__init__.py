"""Processes that another program has started: how they meet, agree, join late and end together."""
