"""Variables in one place, a thread a device that computes with them."""

from trainkit.strategies.central.storage import CentralStorage

__all__ = ["CentralStorage"]
