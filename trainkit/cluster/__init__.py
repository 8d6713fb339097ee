"""Which processes take part in a run, and which of them this one is: pure functions, no process group, no device."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
