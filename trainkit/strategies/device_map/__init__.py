"""One model over several devices of one process."""

from trainkit.strategies.device_map.strategy import DeviceMap

__all__ = ["DeviceMap"]
