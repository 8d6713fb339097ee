"""The server process: it answers pulls and pushes of workers, and executes requests of the chief."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Condition, Event
from typing import Final

import torch
from torch import Tensor, nn

from trainkit.bounded import expect_map
from trainkit.errors import LinkError
from trainkit.strategies.base import PhaseListener, ignore_phase
from trainkit.strategies.parameter_server.server.aggregation import AggregationOptions, GradientAggregator
from trainkit.strategies.parameter_server.server.shard import ServerShard
from trainkit.strategies.parameter_server.wire.auth import AuthenticatedListener
from trainkit.strategies.parameter_server.wire.protocol import (
    RequestRejectedError,
    as_count,
    as_dtype,
    as_flags,
    as_float,
    as_keys,
    decode_gradient,
    dtype_name,
    mask_of,
    take_tensor,
)
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards

CHIEF: Final = "chief"
"""Name of the only task whose requests may change the state."""
_POLL_S: Final = 0.5


def serve(
    listener: AuthenticatedListener,
    shares: VariableShards,
    index: int,
    *,
    make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    on_phase: PhaseListener = ignore_phase,
    timeout_s: float = 60.0,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Hold a shard of the variables until the chief requests the end.

    A server starts empty; pulls wait until the chief has loaded the variables.

    Args:
        listener: accepts the connections; closed when this returns.
        shares: the partition of the variables.
        index: the index of this server's shard.
        make_optimizer: creates the optimizer over named parameters.
        on_phase: receives (phase, version): `update` when one begins, `idle` when it is finished.
        timeout_s: seconds that a pull waits for a version.
        stopped: returns whether to end; called at intervals.

    Raises:
        LinkError: the chief's connection broke.
    """
    server = _Server(shares, index, make_optimizer, on_phase, timeout_s)
    with listener:
        listener.serve(server.serve_client)
        while not server.ended.wait(_POLL_S):
            if stopped():
                return
    if server.broken is not None:
        raise server.broken


class _Server:
    """The state shared by the connections of a server: its variables, the staged gradients, and one lock."""

    def __init__(
        self,
        shares: VariableShards,
        index: int,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        on_phase: PhaseListener,
        timeout_s: float,
    ) -> None:
        self.ended = Event()
        self.broken: BaseException | None = None
        self._pieces = shares.pieces[index]
        self._digest = shares.digest
        self._held = ServerShard(self._pieces, shares.master_dtype, make_optimizer)
        self._merging = GradientAggregator(self._held.params, shares.master_dtype)
        self._on_phase, self._timeout_s = on_phase, timeout_s
        self._changed = Condition()
        self._loading: dict[str, Tensor] = {}
        self._requests: Mapping[str, Callable[[Connection, Frame], None]] = {
            "layout": self._layout, "pull": self._pull, "rows": self._rows, "push": self._push,
        }  # fmt: skip
        self._orders: Mapping[str, Callable[[Connection, Frame], None]] = {
            "sum": self._sum, "total": self._total, "apply": self._apply, "discard": self._discard,
            "drop": self._drop, "load": self._load, "state": self._state, "bye": self._shutdown,
        }  # fmt: skip

    def serve_client(self, link: Connection) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while not self.ended.is_set():
                self._answer(link, link.receive())
        except BaseException as error:  # any error: without the chief nothing more can arrive
            if link.peer == CHIEF and not self.ended.is_set():
                self.broken = error
                self.ended.set()
            raise

    def _answer(self, link: Connection, frame: Frame) -> None:
        known = {**self._requests, **self._orders} if link.peer == CHIEF else self._requests
        if frame.kind not in known:
            link.close()
            raise LinkError(f"{link.peer} requested {frame.kind}, which it may not request")
        try:
            known[frame.kind](link, frame)
        except RequestRejectedError as error:
            link.send("refused", {"why": str(error)})
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:  # for example an optimizer that does not support such gradients
            link.send("refused", {"why": f"{type(error).__name__}: {error}"[:2000]})

    def _layout(self, link: Connection, frame: Frame) -> None:
        if frame.meta.get("digest") != self._digest:
            raise RequestRejectedError(f"{link.peer} has another model, or another number of servers")
        link.send("layout")

    def _pull(self, link: Connection, frame: Frame) -> None:
        chosen = as_flags(frame, "have", len(self._pieces))
        dtype, at_least = as_dtype(frame), as_count(frame, "version")
        with self._changed:
            self._await(at_least)
            lease = self._held.begin_read(chosen, dtype)
        try:
            link.send("pulled", {"version": lease.version, "loads": lease.loads}, lease.tensors)
        finally:
            with self._changed:
                self._held.end_read(lease)

    def _await(self, version: int) -> None:
        """Wait until the variables have this version; the caller holds the lock."""

        def is_there() -> bool:
            return self.ended.is_set() or (self._held.version is not None and self._held.version >= version)

        found = self._changed.wait_for(is_there, self._timeout_s)
        if self.ended.is_set():
            raise LinkError("the run is over")
        if not found:
            held = "nothing" if self._held.version is None else f"version {self._held.version}"
            raise RequestRejectedError(
                f"version {version} was not reached within {self._timeout_s:g} s: the server holds {held}"
            )

    def _rows(self, link: Connection, frame: Frame) -> None:
        piece = self._pieces[as_count(frame, "piece", len(self._held.params) - 1)]
        rows, dtype = torch.empty(as_count(frame, "count", piece.shape[0]), dtype=torch.int64), as_dtype(frame)
        link.read([rows])
        if len(rows) and not (rows.min() >= 0 and rows.max() < piece.shape[0]):
            raise RequestRejectedError("rows: there are no such rows")
        with self._changed:
            self._await(0)
            found = self._held.rows(piece, rows, dtype)
        link.send("rows", {}, [found])

    def _push(self, link: Connection, frame: Frame) -> None:
        [key] = as_keys(frame)
        gradient = decode_gradient(link, frame, self._pieces, self._merging.pool)
        with self._changed:
            self._merging.stage(key, gradient)
        link.send("pushed")

    def _sum(self, link: Connection, frame: Frame) -> None:
        keys, options = as_keys(frame), AggregationOptions(**expect_map(frame.meta.get("wishes", {}), {}))
        with self._changed:
            gradients = self._merging.take(keys)
        result = self._merging.aggregate(gradients, options)
        places = set(result.places)
        have = mask_of([number in places for number in range(len(self._pieces))])
        norms = [result.norms] if options.norms else []
        with self._changed:
            others = not options.check_others or self._held.stays_finite(self._merging.total)
        link.send("sums", {"finite": result.finite, "others": others, "have": have, "norms": options.norms}, norms)

    def _total(self, link: Connection, frame: Frame) -> None:
        found = self._merging.total[as_count(frame, "piece", len(self._merging.total) - 1)]
        if found is None or found.is_sparse:
            raise RequestRejectedError("total: this server does not hold all of it")
        link.send("total", {}, [found])

    def _apply(self, link: Connection, frame: Frame) -> None:
        version = as_count(frame, "version")
        self._on_phase("update", version)
        with self._changed:
            if "keys" in frame.meta:
                self._merging.aggregate(self._merging.take(as_keys(frame)), AggregationOptions())
            self._merging.scale(as_float(frame, "factor"))
            self._held.update(
                self._merging.total,
                version=version,
                lr_factor=as_float(frame, "rate"),
                buffer_factor=as_float(frame, "buffers"),
            )
            self._merging.forget()
            self._changed.notify_all()
        self._on_phase("idle", version)
        link.send("applied")

    def _discard(self, link: Connection, frame: Frame) -> None:  # noqa: ARG002 - a request like any other
        with self._changed:
            self._merging.forget()
        link.send("discarded")

    def _drop(self, link: Connection, frame: Frame) -> None:
        with self._changed:
            self._merging.drop(as_keys(frame))
        link.send("dropped")

    def _load(self, link: Connection, frame: Frame) -> None:
        """Load one tensor after another; all are applied at the last message, which has none."""
        key = frame.meta.get("key")
        if isinstance(key, str):
            most = max((piece.numel for piece in self._pieces if key.endswith(f"/{piece.variable.name}")), default=0)
            self._loading[key] = take_tensor(link, frame, 8 * max(most, 1))
            return
        with self._changed:
            loading, self._loading = self._loading, {}
            self._held.load(loading, as_count(frame, "version"))
            self._merging.forget()
            self._changed.notify_all()
        link.send("loaded")

    def _state(self, link: Connection, frame: Frame) -> None:  # noqa: ARG002 - a request like any other
        for key, tensor in self._held.state():
            link.send("tensor", {"key": key, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}, [tensor])
        link.send("complete")

    def _shutdown(self, link: Connection, frame: Frame) -> None:  # noqa: ARG002 - a request like any other
        link.send("bye")
        self.ended.set()
        with self._changed:
            self._changed.notify_all()
