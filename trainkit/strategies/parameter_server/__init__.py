"""Variables on servers, gradients from workers that come and go."""

from trainkit.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
