"""Fully sharded data parallelism, by torch's `fully_shard`."""

from trainkit.strategies.fsdp.strategy import Fsdp

__all__ = ["Fsdp"]
