"""One model over several devices of one process."""
