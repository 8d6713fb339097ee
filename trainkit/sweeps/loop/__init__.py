"""The loop of a sweep: when each job runs, on which devices, and in which process."""
