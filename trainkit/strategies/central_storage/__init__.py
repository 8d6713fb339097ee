"""Variables in one place, a thread a device that computes with them."""

from trainkit.strategies.central_storage.strategy import CentralStorage

__all__ = ["CentralStorage"]
