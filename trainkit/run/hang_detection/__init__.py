"""Find a rank that makes no progress, from its heartbeats and the kernel's records of its process."""
