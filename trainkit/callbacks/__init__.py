"""The callbacks of a run, one file each."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
