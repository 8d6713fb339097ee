"""A task's client of all servers: it sends a request to all of them at once, to each for its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.base import JsonMap
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.parameter_server.server.aggregation import AggregationOptions, Norms, joined
from trainkit.strategies.parameter_server.wire.auth import connect
from trainkit.strategies.parameter_server.wire.encoding import (
    FullStateAssembler,
    PullBuffer,
    encode_for_server,
    on_the_wire,
    rows_to_load,
)
from trainkit.strategies.parameter_server.wire.protocol import as_count, as_flags, dtype_name
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards
from trainkit.strategies.tensors.layouts import in_layout

T = TypeVar("T")
_MORE_S = 10.0
"""Extra seconds, so that a server can report a timeout before the client times out."""
_PULLS = 8
"""Attempts to read all servers at one version."""


class ParameterServerClient:
    """The servers of a run for one task: requests of workers, and orders of the chief.

    One thread at a time uses it; `connect` creates it.

    Args:
        transfer: the dtype of transferred gradients and parameters; None: their own dtype.
        timeout_s: seconds that an answer may take.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        shares: VariableShards,
        *,
        transfer: torch.dtype | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.links, self.shares, self.transfer = list(links), shares, transfer
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(len(links), thread_name_prefix="servers") if len(links) > 1 else None
        self.version = -1
        """The version of the variables that were pulled last."""
        self.mixed = False
        """Whether the pulled variables have several versions, because no attempt found all servers at one."""
        self.loads: int | None = None
        """Number of loads of the servers at the last pull."""
        self._buffers: dict[int, tuple[tuple[Any, ...], PullBuffer]] = {}

    @classmethod
    def connect(
        cls,
        addresses: Sequence[tuple[str, int]],
        shares: VariableShards,
        *,
        token: bytes,
        name: str,
        timeout_s: float = 60.0,
        transfer: torch.dtype | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Connect to all servers, retrying for `timeout_s`; they execute requests of the task `chief` only.

        Raises:
            LinkError: a server cannot be reached.
            TrainingError: a server holds another model.
        """
        links: list[Connection] = []
        try:
            for index, address in enumerate(addresses):
                peer = f"ps:{index}"
                link = connect(address, token=token, name=name, peer=peer, timeout_s=timeout_s, is_over=is_over)
                links.append(link)
            found = cls(links, shares, transfer=transfer, timeout_s=timeout_s)
            for server, link in enumerate(links):
                link.send("layout", {"digest": shares.digest})
                found.answer(server, "layout")
        except BaseException:
            for link in links:
                link.close()
            raise
        return found

    def close(self) -> None:
        """Close the connections."""
        for link in self.links:
            link.close()
        if self._threads is not None:
            self._threads.shutdown()

    def answer(self, server: int, *kinds: str) -> Frame:
        """Receive the answer of a server to a request.

        Raises:
            TrainingError: the server rejects the request; the error contains its reason.
            LinkError: the connection broke, or the answer is of another kind.
        """
        frame = self.links[server].receive(self._timeout_s + _MORE_S)
        if frame.kind == "refused":
            raise TrainingError(f"ps:{server} refuses: {frame.meta.get('why')}")
        if frame.kind not in kinds:
            raise LinkError(f"ps:{server} sent {frame.kind}, and {' or '.join(kinds)} was expected")
        return frame

    def each(self, request: Callable[[int], T], servers: Sequence[int] | None = None) -> list[T]:
        """Run a request on several servers in parallel, by default on all; return when all have answered.

        Raises:
            LinkError, TrainingError: of the first that fails, after all have answered.
        """
        chosen = range(len(self.links)) if servers is None else servers
        if self._threads is None or len(chosen) < 2:
            return [request(server) for server in chosen]
        futures = [self._threads.submit(request, server) for server in chosen]
        wait(futures)
        return [one.result() for one in futures]

    def pull(self, into: Sequence[Tensor | None]) -> int:
        """Read the variables; untrained ones only if they were loaded since the last pull.

        Args:
            into: one tensor per variable, which is overwritten; None: skip it (its rows are pulled by `pull_rows`).

        Returns:
            The version (number of updates) of the variables; the oldest if there are several (`mixed`).

        Raises:
            LinkError: the connection to a server broke.
        """
        while True:
            whole = self.loads is None
            found = self._pulled_alike(into, whole=whole)
            loads = {load for _, load in found}
            if loads == {self.loads} or (whole and len(loads) == 1):
                break
            self.loads = None
        [self.loads] = loads
        self.version = min(version for version, _ in found)
        return self.version

    def _pulled_alike(self, into: Sequence[Tensor | None], *, whole: bool) -> list[tuple[int, int]]:
        """Read all servers, and repeat if an update came in between; return version and loads of each.

        All servers are read again, not only the ones behind, so that the requests arrive at the same time.
        """
        self.mixed, newest = False, 0
        for _ in range(_PULLS):
            at_least = newest
            found = self.each(lambda server: self._pulled(server, into, whole=whole, version=at_least))  # noqa: B023
            newest = max(version for version, _ in found)
            if all(version == newest for version, _ in found):
                return found
        self.mixed = True
        return found

    def _pulled(self, server: int, into: Sequence[Tensor | None], *, whole: bool, version: int = 0) -> tuple[int, int]:
        """Read one server's variables, of that version or a later one."""
        buffer, link = self._buffer_for(server, into, whole=whole), self.links[server]
        link.send("pull", {"have": buffer.mask, "dtype": dtype_name(buffer.dtype), "version": version})
        answer = self.answer(server, "pulled")
        link.read_memory(buffer.views)
        buffer.settle()
        return as_count(answer, "version"), as_count(answer, "loads")

    def _buffer_for(self, server: int, into: Sequence[Tensor | None], *, whole: bool) -> PullBuffer:
        """Return the buffer of a pull; the last one is reused if the tensors are the same."""
        key = (whole, *(None if tensor is None else tensor.data_ptr() for tensor in into))
        known = self._buffers.get(server)
        if known is not None and known[0] == key:
            return known[1]
        dtype = self.transfer or self._dtype_of(into)
        buffer = PullBuffer(self.shares.pieces[server], into, whole=whole, dtype=dtype)
        self._buffers[server] = key, buffer
        return buffer

    def _dtype_of(self, into: Sequence[Tensor | None]) -> torch.dtype:
        """Return the dtype in which trainable parameters are pulled: the server rounds the master parameters."""
        pairs = zip(into, self.shares.variables, strict=True)
        found = [tensor.dtype for tensor, one in pairs if tensor is not None and one.kind == "param"]
        return found[0] if found else self.shares.master_dtype

    def pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Return the current rows of a trainable variable, (len(rows), ...), in the order of `rows`: (n,) int64,
        possibly with duplicates.

        Raises:
            LinkError: the connection to a server broke.
        """
        wanted, order = torch.unique(rows.detach().cpu(), return_inverse=True)
        variable, dtype = self.shares.variables[place], self.transfer or self.shares.master_dtype
        found = torch.empty((len(wanted), *variable.shape[1:]), dtype=dtype)
        numbers = self._numbers(place)

        def ask(server: int) -> None:
            number = numbers[server]
            piece, link = self.shares.pieces[server][number], self.links[server]
            first, last = torch.searchsorted(wanted, torch.tensor([piece.start, piece.stop])).tolist()
            meta = {"piece": number, "count": last - first, "dtype": dtype_name(dtype)}
            link.send("rows", meta, [wanted[first:last] - piece.start])
            self.answer(server, "rows")
            link.read([found[first:last]])

        self.each(ask, list(numbers))
        return found[order]

    def push(self, key: str, grads: Sequence[Tensor | None], buffers: Sequence[Tensor | None] = ()) -> None:
        """Stage a gradient at the servers, until the chief makes them apply it.

        Args:
            key: name of the gradient; it replaces another one of that name.
            grads: one per trainable parameter, dense or sparse; None if there is none.
            buffers: one per buffer, in the dtype of the master parameters: from `StepBuffers.take`, None for missing
                ones.

        Raises:
            LinkError: the connection to a server broke.
        """
        dtype = self.transfer or self.shares.master_dtype
        tensors: list[Tensor | None] = [None] * len(self.shares.variables)
        dtypes = [dtype] * len(grads) + [self.shares.master_dtype] * len(buffers)
        sent = on_the_wire([*grads, *buffers], dtypes)
        tensors[: len(grads)] = sent[: len(grads)]
        if buffers:
            tensors[-len(buffers) :] = sent[len(grads) :]

        def send(server: int) -> None:
            meta, parts = encode_for_server(self.shares.pieces[server], tensors, dtype)
            self.links[server].send("push", {"keys": [key], **meta}, parts)
            self.answer(server, "pushed")

        self.each(send)

    def load_state(
        self, tensors: Mapping[str, Tensor], *, version: int, unsaved: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the variables into the servers; for the chief.

        Args:
            tensors: parameters, buffers and the optimizer's state, from `replica_state`; a checkpoint is read piece by
                piece.
            version: number of updates of the variables.
            unsaved: `buffer/<name>` -> buffers that no checkpoint holds (`unsaved_of`).

        Raises:
            CheckpointError: they belong to another model.
        """
        own = {one.key: one.shape for one in self.shares.variables if one.saved}
        refuse_mismatch(own, tensors)

        def load(server: int) -> None:
            link = self.links[server]
            for key, tensor in rows_to_load(self.shares.pieces[server], tensors, unsaved or {}):
                meta = {"key": key, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
                link.send("load", meta, [tensor])
            link.send("load", {"version": version})
            self.answer(server, "loaded")

        self.each(load)

    def state(self) -> dict[str, Tensor]:
        """Return parameters, saved buffers and optimizer state as full tensors, named as in `replica_state`."""
        assembler = FullStateAssembler(self.shares)

        def read(server: int) -> None:
            link = self.links[server]
            link.send("state")
            while (frame := self.answer(server, "tensor", "complete")).kind == "tensor":
                assembler.add(link, frame, server)

        self.each(read)
        return assembler.tensors()

    def sum(self, keys: Sequence[str], options: AggregationOptions, *, exact: bool = False) -> Norms:
        """Sum staged gradients; the sum then waits for `apply` or `discard_sum`; for the chief.

        Args:
            keys: one per shard of the step, in their order.
            options: the order of summation, and the operations on the sum.
            exact: compute the norm of a split variable from the full gradient, which is transferred for that.
        """

        def ask(server: int) -> tuple[bool, bool, dict[int, Tensor]]:
            link, pieces = self.links[server], self.shares.pieces[server]
            link.send("sum", {"keys": list(keys), "wishes": asdict(options)})
            answer = self.answer(server, "sums")
            flags = as_flags(answer, "have", len(pieces)) if options.norms else []
            norms = torch.empty(sum(flags), dtype=self.shares.master_dtype)
            link.read([norms])
            places = [piece.place for piece, flag in zip(pieces, flags, strict=False) if flag]
            finite, others = bool(answer.meta["finite"]), bool(answer.meta["others"])
            return finite, others, dict(zip(places, norms.unbind(), strict=True))

        answers = self.each(ask)
        parts: dict[int, list[Tensor]] = {}
        for _, _, norms in answers:
            for place, norm in norms.items():
                parts.setdefault(place, []).append(norm)
        return Norms(
            finite=all(finite for finite, _, _ in answers),
            others_finite=all(others for _, others, _ in answers),
            values=joined(parts, self._whole if exact else None),
        )

    def apply(
        self,
        *,
        version: int,
        lr_factor: float,
        factor: float = 1.0,
        buffer_factor: float = 1.0,
        keys: Sequence[str] | None = None,
    ) -> None:
        """Make an update of the last sum, on all servers; for the chief.

        Args:
            version: the version of the variables afterwards.
            lr_factor: factor of every learning rate.
            factor: factor of the gradients.
            buffer_factor: factor of the sums of floating-point buffers.
            keys: sum these gradients first; empty: only the version changes.

        Raises:
            TrainingError: an optimizer refuses such gradients, or one of the keys does not exist.
        """
        meta: dict[str, Any] = {"version": version, "rate": lr_factor, "factor": factor, "buffers": buffer_factor}
        self._order("apply", meta if keys is None else {**meta, "keys": list(keys)}, "applied")

    def discard_sum(self) -> None:
        """Discard the last sum; for the chief."""
        self._order("discard", {}, "discarded")

    def discard_staged(self, keys: Sequence[str]) -> None:
        """Discard staged gradients of these names, if they exist; for the chief.

        A server does not do this by itself: gradients of a dead worker may be reported, and must then be applied by all
        servers.
        """
        self._order("drop", {"keys": list(keys)}, "dropped")

    def shutdown(self) -> None:
        """End the servers; for the chief."""
        self._order("bye", {}, "bye")

    def _order(self, kind: str, meta: JsonMap, answer: str) -> None:
        def ask(server: int) -> None:
            self.links[server].send(kind, meta)
            self.answer(server, answer)

        self.each(ask)

    def _numbers(self, place: int) -> dict[int, int]:
        """Return the servers that hold rows of a variable -> the index of that piece there."""
        return {
            server: number
            for server, pieces in enumerate(self.shares.pieces)
            for number, piece in enumerate(pieces)
            if piece.place == place
        }

    def _whole(self, place: int) -> Tensor:
        """Return the full gradient of a split variable in the last sum."""
        whole = torch.empty(self.shares.variables[place].shape, dtype=self.shares.master_dtype)
        numbers = self._numbers(place)

        def ask(server: int) -> None:
            link, piece = self.links[server], self.shares.pieces[server][numbers[server]]
            link.send("total", {"piece": numbers[server]})
            self.answer(server, "total")
            link.read([piece.of(whole)])

        self.each(ask, list(numbers))
        return in_layout(whole, self.shares.variables[place].strides)  # a norm sums in the order of the memory
