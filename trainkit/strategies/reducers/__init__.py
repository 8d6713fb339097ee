"""Reducers: how the partial sums of a step become its total on every rank."""

from trainkit.strategies.reducers.auto import AutoReducer
from trainkit.strategies.reducers.backend import BackendReducer
from trainkit.strategies.reducers.base import Closing, Overlapping, Partials, Reducer
from trainkit.strategies.reducers.flat import FlatReducer, Transport
from trainkit.strategies.reducers.lanes import LaneReducer
from trainkit.strategies.reducers.local import LocalReducer

__all__ = [
    "AutoReducer",
    "BackendReducer",
    "Closing",
    "FlatReducer",
    "LaneReducer",
    "LocalReducer",
    "Overlapping",
    "Partials",
    "Reducer",
    "Transport",
]
