"""Replicas that train separately and average their models periodically."""

from trainkit.strategies.local_sgd.strategy import LocalSgd

__all__ = ["LocalSgd"]
