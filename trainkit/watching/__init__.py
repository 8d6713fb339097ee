"""Show every run below a folder live: in the terminal."""
