"""Replicas that train separately and average their models periodically."""
