"""Strategies: how shards are spread over replicas, and how their gradients become one update."""
