"""Reducers: they sum the partial sums of a step over all ranks."""

from trainkit.strategies.reducers.auto import AutoReducer
from trainkit.strategies.reducers.backend import BackendReducer
from trainkit.strategies.reducers.base import Closing, LocalReducer, Overlapping, Partials, Reducer
from trainkit.strategies.reducers.deterministic import DeterministicReducer
from trainkit.strategies.reducers.flat import FlatReducer, Transport

__all__ = [
    "AutoReducer",
    "BackendReducer",
    "Closing",
    "DeterministicReducer",
    "FlatReducer",
    "LocalReducer",
    "Overlapping",
    "Partials",
    "Reducer",
    "Transport",
]
