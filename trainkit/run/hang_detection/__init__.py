"""Find a rank that makes no progress, by its heartbeats and what the kernel says of its process."""
