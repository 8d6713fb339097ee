"""The schedules that a config may name."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
