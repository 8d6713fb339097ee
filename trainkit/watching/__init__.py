"""Every run below a folder, live: in the terminal, and on a page of this machine alone."""
