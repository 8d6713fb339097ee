"""A task's connections to all servers: a request goes to each of them at once, for the part that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.parameter_server.server.aggregation import AggregationOptions
from trainkit.strategies.parameter_server.server.norms import Norms, joined
from trainkit.strategies.parameter_server.wire.client_base import ServerConnections
from trainkit.strategies.parameter_server.wire.full_state import FullStateAssembler, rows_to_load
from trainkit.strategies.parameter_server.wire.protocol import as_flags, dtype_name
from trainkit.strategies.parameter_server.wire.transfer import PullBuffer, encode_for_server, on_the_wire
from trainkit.strategies.tensors.layouts import in_layout

__all__ = ["ParameterServerClient"]

_PULLS = 8
"""Tries to read all servers at one version."""


class ParameterServerClient(ServerConnections):
    """The servers of a run, as one task sees them: what workers ask for, and what the chief orders.

    One thread at a time uses it; `connect` makes it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version = -1
        """Of the variables that were pulled last."""
        self.mixed = False
        """Whether those are of several versions: no try found all servers at one."""
        self.loads: int | None = None
        """How often the servers had been given their numbers when they were pulled last."""
        self._landings: dict[int, tuple[tuple[Any, ...], PullBuffer]] = {}

    def pull(self, into: Sequence[Tensor | None]) -> int:
        """Read the variables; what is not trained only where it was loaded since.

        Args:
            into: a tensor a variable, which changes; None: leave it out (its rows are pulled by `pull_rows`).

        Returns:
            The version: how many updates they have seen. Of several (`mixed`), the oldest.

        Raises:
            LinkError: a server is gone.
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
        """Read all servers, again where an update came in between; returns version and loads of each.

        All again, not those alone that were behind: what counts is when requests arrive, and that is then at once.
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
        landing, link = self._landing(server, into, whole=whole), self.links[server]
        link.send("pull", {"have": landing.mask, "dtype": dtype_name(landing.dtype), "version": version})
        answer = self.answer(server, "pulled")
        link.read_memory(landing.views)
        landing.settle()
        return int(answer.meta["version"]), int(answer.meta["loads"])

    def _landing(self, server: int, into: Sequence[Tensor | None], *, whole: bool) -> PullBuffer:
        """Where it lands; known from the last time where the tensors are the same."""
        key = (whole, *(None if tensor is None else tensor.data_ptr() for tensor in into))
        known = self._landings.get(server)
        if known is not None and known[0] == key:
            return known[1]
        dtype = self.transfer or self._dtype_of(into)
        landing = PullBuffer(self.shares.pieces[server], into, whole=whole, dtype=dtype)
        self._landings[server] = key, landing
        return landing

    def _dtype_of(self, into: Sequence[Tensor | None]) -> torch.dtype:
        """What trainable parameters are pulled in: rounding the masters is the server's work."""
        pairs = zip(into, self.shares.variables, strict=True)
        found = [tensor.dtype for tensor, one in pairs if tensor is not None and one.kind == "param"]
        return found[0] if found else self.shares.master_dtype

    def pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Rows of a variable, (len(rows), ...), in the order asked for, as they are now.

        Args:
            place: the number of a trainable variable.
            rows: (n,) int64, any of them several times.

        Raises:
            LinkError: a server is gone.
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
        """Leave a gradient with the servers, for the chief to have it applied.

        Args:
            key: its name; another of that name is replaced.
            grads: one a trainable parameter, dense or sparse; None where there is none.
            buffers: one a buffer, in the masters' dtype: what `StepBuffers.take` gives, None for those it has not.

        Raises:
            LinkError: a server is gone.
        """
        dtype = self.transfer or self.shares.master_dtype
        tensors: list[Tensor | None] = [None] * len(self.shares.variables)
        tensors[: len(grads)] = [on_the_wire(grad, dtype) for grad in grads]
        if buffers:
            tensors[-len(buffers) :] = [on_the_wire(total, self.shares.master_dtype) for total in buffers]

        def send(server: int) -> None:
            meta, parts = encode_for_server(self.shares.pieces[server], tensors, dtype)
            self.links[server].send("push", {"keys": [key], **meta}, parts)
            self.answer(server, "pushed")

        self.each(send)

    def load_state(
        self, tensors: Mapping[str, Tensor], *, version: int, unsaved: Mapping[str, Tensor] | None = None
    ) -> None:
        """Give the servers their numbers; the chief's.

        Args:
            tensors: parameters, buffers and the optimizer's state, as `replica_state` gives them; a checkpoint is read
                piece by piece.
            version: updates that they have seen.
            unsaved: `buffer/<name>` -> buffers that no checkpoint holds (`unsaved_of`).

        Raises:
            CheckpointError: they are of another model.
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
        """Parameters, buffers that are saved and the optimizer's state, whole, as `replica_state` names them."""
        wholes = FullStateAssembler(self.shares)

        def read(server: int) -> None:
            link = self.links[server]
            link.send("state")
            while (frame := self.answer(server, "tensor", "complete")).kind == "tensor":
                wholes.add(link, frame, server)

        self.each(read)
        return wholes.tensors()

    def sum(self, keys: Sequence[str], *, exact: bool = False, **wished: Any) -> Norms:
        """Add up what was pushed; it then waits for `apply` or `discard`; the chief's.

        Args:
            keys: one a shard of the step, in their order.
            exact: take the norm of a variable that is cut from the whole of it, which travels for that.
            wished: the order of summation, and what is done to the sum: fields of `AggregationOptions`. Whether it is
                finite is looked at where nothing else is said.
        """
        wishes = AggregationOptions(**{"check_finite": True, **wished})

        def ask(server: int) -> tuple[bool, bool, dict[int, Tensor]]:
            link, pieces = self.links[server], self.shares.pieces[server]
            link.send("sum", {"keys": list(keys), "wishes": asdict(wishes)})
            answer = self.answer(server, "sums")
            flags = as_flags(answer, "have", len(pieces)) if wishes.norms else []
            norms = torch.empty(sum(flags), dtype=self.shares.master_dtype)
            link.read([norms])
            places = [piece.place for piece, flag in zip(pieces, flags, strict=False) if flag]
            finite, others = bool(answer.meta["finite"]), bool(answer.meta["others"])
            return finite, others, dict(zip(places, norms.unbind(), strict=True))

        told = self.each(ask)
        parts: dict[int, list[Tensor]] = {}
        for _, _, norms in told:
            for place, norm in norms.items():
                parts.setdefault(place, []).append(norm)
        return Norms(
            finite=all(finite for finite, _, _ in told),
            others_finite=all(others for _, others, _ in told),
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
        """Make an update of the last sum, on all servers; the chief's.

        Args:
            version: that the variables have afterwards.
            lr_factor: every rate is multiplied by it.
            factor: gradients are multiplied by it.
            buffer_factor: sums of floating buffers are multiplied by it.
            keys: add these up first; none: an update of nothing but the version.

        Raises:
            TrainingError: an optimizer refuses such gradients; or one of the keys is not there.
        """
        meta: dict[str, Any] = {"version": version, "rate": lr_factor, "factor": factor, "buffers": buffer_factor}
        self._order("apply", meta if keys is None else {**meta, "keys": list(keys)}, "applied")

    def discard_sum(self) -> None:
        """Forget the last sum; the chief's."""
        self._order("discard", {}, "discarded")

    def discard_staged(self, keys: Sequence[str]) -> None:
        """Forget what was pushed under these names, where it was; the chief's.

        No server does so by itself: what a dead worker has left may be reported, and must then be applied by all.
        """
        self._order("drop", {"keys": list(keys)}, "dropped")

    def shutdown(self) -> None:
        """Let the servers end; the chief's."""
        self._order("bye", {}, "bye")

    def _order(self, kind: str, meta: Mapping[str, Any], answer: str) -> None:
        def ask(server: int) -> None:
            self.links[server].send(kind, meta)
            self.answer(server, answer)

        self.each(ask)

    def _numbers(self, place: int) -> dict[int, int]:
        """Servers that hold rows of a variable -> the number of that piece there."""
        return {
            server: number
            for server, pieces in enumerate(self.shares.pieces)
            for number, piece in enumerate(pieces)
            if piece.place == place
        }

    def _whole(self, place: int) -> Tensor:
        """The last sum's gradient of a variable that is cut."""
        whole = torch.empty(self.shares.variables[place].shape, dtype=self.shares.master_dtype)
        numbers = self._numbers(place)

        def ask(server: int) -> None:
            link, piece = self.links[server], self.shares.pieces[server][numbers[server]]
            link.send("total", {"piece": numbers[server]})
            self.answer(server, "total")
            link.read([piece.of(whole)])

        self.each(ask, list(numbers))
        return in_layout(whole, self.shares.variables[place].strides)  # a norm sums in the order of the memory
