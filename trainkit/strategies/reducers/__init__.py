"""Reducers: they sum the partial sums of a step over all ranks."""

from trainkit.strategies.reducers.backend import BackendReducer
from trainkit.strategies.reducers.base import LocalReducer, Partials, Reducer
from trainkit.strategies.reducers.deterministic import DeterministicReducer
from trainkit.strategies.reducers.gradient_vector import FlatReducer
from trainkit.strategies.reducers.options import AutoReducer
from trainkit.strategies.reducers.per_device import PerDeviceReducer

__all__ = [
    "AutoReducer",
    "BackendReducer",
    "DeterministicReducer",
    "FlatReducer",
    "LocalReducer",
    "Partials",
    "PerDeviceReducer",
    "Reducer",
]
