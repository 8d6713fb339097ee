"""Strategies: how shards are spread over replicas, and how their gradients become one update."""

from typing import Final

from trainkit.names import lazy

__all__ = ["ALL_DEVICES"]

ALL_DEVICES: Final = "strategy=mirrored"
"""The override that trains a config of one device on every device of its host."""

__getattr__ = lazy(__name__)
