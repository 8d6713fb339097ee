"""The loop of a sweep: which job runs when, on which devices, in which process."""
