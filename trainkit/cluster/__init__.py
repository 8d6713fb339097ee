"""Which processes take part in a run, and which of them this one is: pure functions, no process group, no device."""
