"""Parameter server: servers hold the variables, workers that may join and leave compute gradients."""

from trainkit.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
