"""A server: it holds a shard of the variables, aggregates gradients and applies updates."""
