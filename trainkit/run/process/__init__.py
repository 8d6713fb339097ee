"""The processes of ranks: how they are started, what they report, and how they end."""
