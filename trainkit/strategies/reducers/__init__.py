"""Reducers: how the partial sums of a step become its total on every rank."""

from trainkit.strategies.reducers.backend import BackendReducer
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.lanes import LaneReducer
from trainkit.strategies.reducers.local import LocalReducer

__all__ = ["BackendReducer", "LaneReducer", "LocalReducer", "Partials", "Reducer"]
