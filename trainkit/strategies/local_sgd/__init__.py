"""Replicas that train apart and average their models now and then."""

from trainkit.strategies.local_sgd.strategy import LocalSgd

__all__ = ["LocalSgd"]
