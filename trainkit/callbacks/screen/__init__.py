"""Parts of the live line: the remaining time, and the line of a notebook."""
