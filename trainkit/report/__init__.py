"""Output for the user: the table before the first step, the closing lines, the log, pages and pictures."""
