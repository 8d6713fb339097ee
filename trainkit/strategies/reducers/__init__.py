"""Reducers: they sum the partial sums of a step over all ranks."""

from trainkit.strategies.reducers.base import LocalReducer, PerDeviceReducer, Reducer
from trainkit.strategies.reducers.deterministic import DeterministicReducer
from trainkit.strategies.reducers.vector import BackendReducer, VectorReducer

__all__ = ["BackendReducer", "DeterministicReducer", "LocalReducer", "PerDeviceReducer", "Reducer", "VectorReducer"]
