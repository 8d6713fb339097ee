"""Who am I, who are the others: pure functions, no process group, no device."""
