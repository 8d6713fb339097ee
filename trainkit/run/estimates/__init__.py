"""Estimates of a run before it starts: memory, work, traffic, time and cost; pure, without a process or a device."""
