"""Common code of all strategies: the synchronous step, the optimizer step, replicas and buffers."""
