"""Show every run below a folder live: in the terminal, and on a page that only this machine can open."""
