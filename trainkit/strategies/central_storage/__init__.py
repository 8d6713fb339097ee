"""Variables in one place, and one thread per device that computes with them."""

from trainkit.strategies.central_storage.strategy import CentralStorage

__all__ = ["CentralStorage"]
