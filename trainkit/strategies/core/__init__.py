"""What all strategies share: the synchronous step, the optimizer step, replicas and buffers."""
