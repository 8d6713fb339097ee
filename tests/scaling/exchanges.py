"""Exchanges of a ring and of parameter servers, for the model of a step."""

from __future__ import annotations

from trainkit.scaling.model import Exchange, Exchanges


def ring(num_bytes: float) -> Exchanges:
    """Return the exchanges of an all-reduce over a ring."""

    def of(replicas: int) -> Exchange:
        sent = 2 * (replicas - 1) / replicas * num_bytes
        return Exchange(own_bytes=sent, wall_bytes=sent, messages=2 * (replicas - 1), overlaps=True)

    return of


def servers(num_bytes: float, count: int, *, is_async: bool = False) -> Exchanges:
    """Return the exchanges with parameter servers: variables are pulled, gradients pushed.

    The two directions of a link are used one after the other by a synchronous step, at the same time otherwise.
    """

    def of(replicas: int) -> Exchange:
        wall = replicas * num_bytes / count * (1 if is_async else 2)
        return Exchange(own_bytes=2 * num_bytes, wall_bytes=wall, messages=2, waits=not is_async)

    return of
