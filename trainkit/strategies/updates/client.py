"""A task's client of all servers: it sends a request to all of them at once, to each for its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from trainkit.bounded import expect_map, whole_numbers
from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.base import JsonMap
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.tensor_shards import name_in, read_slice, shape_of
from trainkit.strategies.tensors.layouts import in_layout, in_memory_order
from trainkit.strategies.tensors.staging import ByteLayout, TensorKind, host_bytes, moved
from trainkit.strategies.updates.links import Connection, Frame, dtype_name
from trainkit.strategies.updates.server import Request, SumOptions, VariableServer
from trainkit.strategies.updates.variables import RowShard, VariableShards, row_dtype

P = ParamSpec("P")
T = TypeVar("T")
_MORE_S = 10.0
"""Extra seconds, so that a server can report a timeout before the client times out."""
_PULLS = 8
"""Attempts to read all servers at one version."""


class Sum(NamedTuple):
    """The properties of a sum of gradients that the chief needs for its decision."""

    finite: bool
    """Whether every number is finite, if requested; else True."""
    others_finite: bool
    """Whether finite buffers stay finite, if requested; else True."""
    norm: Tensor
    """() the global norm, if requested; norms of variables are combined in canonical order."""


class PullBuffer:
    """The memory into which a server's variables are read: that of the tensors themselves, if possible.

    Args:
        into: one tensor per variable; None: not read.
        whole: whether untrained variables are read as well.
        dtype: the dtype in which trainable parameters are transferred.
    """

    def __init__(
        self, pieces: Sequence[RowShard], into: Sequence[Tensor | None], *, whole: bool, dtype: torch.dtype
    ) -> None:
        self.dtype, self.skip = dtype, list[int]()
        self.memory: dict[str, Tensor] = {}
        """The destination of each piece, by its number."""
        apart: dict[str, tuple[Tensor, TensorKind]] = {}
        for number, piece in enumerate(pieces):
            target = into[piece.place]
            if target is None or (piece.variable.kind == "frozen" and not whole):
                self.skip.append(number)
                continue
            own = piece.of(target.detach())
            wire = dtype if piece.variable.kind == "param" else piece.variable.dtype
            fits = own.is_contiguous() if piece.strides is None else own.stride() == piece.strides
            if fits and own.device.type == "cpu" and own.dtype is wire:
                self.memory[str(number)] = in_memory_order(own)
            else:  # the server sends the memory of its piece in its own layout
                apart[str(number)] = own, TensorKind(torch.Size(piece.shape), wire, piece.strides)
        self._apart = [tensor for tensor, _ in apart.values()]
        self._device = self._apart[0].device if self._apart else torch.device("cpu")
        self._layout = ByteLayout([kind for _, kind in apart.values()])
        self._host = host_bytes(self._layout.size, self._device)
        views = map(in_memory_order, self._layout.views(self._host))
        self.memory |= dict(zip(apart, views, strict=True))

    def settle(self) -> None:
        """Copy the numbers received into separate memory to their tensors, in one transfer to the device."""
        if self._apart:
            torch._foreach_copy_(self._apart, self._layout.views(self._host.to(self._device)))


class ParameterServerClient:
    """The servers of a run for one task: requests of workers, and orders of the chief.

    One thread at a time uses it.

    Args:
        links: connections to all servers; they execute requests of the task `chief` only. Closed after an error.
        transfer: the dtype of transferred gradients and parameters; None: their own dtype.
        timeout_s: seconds that an answer may take.

    Raises:
        TrainingError: a server holds another model.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        shares: VariableShards,
        *,
        transfer: torch.dtype | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.links, self.shares, self._transfer = list(links), shares, transfer
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(len(links), thread_name_prefix="servers") if len(links) > 1 else None
        self.version = -1
        """The version of the variables that were pulled last."""
        self.mixed = False
        """Whether the pulled variables have several versions, because no attempt found all servers at one."""
        self.loads: int | None = None
        """Number of loads of the servers at the last pull."""
        self._buffers: dict[int, tuple[tuple[object, ...], PullBuffer]] = {}
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        for link in self.links:
            link.close()
        if self._threads is not None:
            self._threads.shutdown()

    def check(self) -> None:
        """Wait for an answer of every server.

        Raises:
            TrainingError: a server holds another model.
            LinkError: the connection to a server broke, or it does not answer.
        """
        self._all(VariableServer.layout, digest=self.shares.digest)

    def ask(
        self,
        server: int,
        tensors: Mapping[str, Tensor],
        verb: Callable[Concatenate[VariableServer, Request, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> JsonMap:
        """Send a request to a server; return the answer, whose tensors are then to be read."""
        assert not args, "arguments of a verb have names"
        self.links[server].send(verb.__name__, kwargs, tensors)
        return self.answer(server).meta

    def answer(self, server: int, *kinds: str) -> Frame:
        """Receive an answer of a server, or a frame of other kinds.

        Raises:
            TrainingError: the server rejects the request; the error contains its reason.
            LinkError: the connection broke, or the answer is of another kind.
        """
        frame = self.links[server].receive(self._timeout_s + _MORE_S)
        if frame.kind == "refused":
            raise TrainingError(f"ps:{server} refuses: {frame.meta.get('why')}")
        if frame.kind not in (kinds or ("answer",)):
            raise LinkError(f"ps:{server} sent {frame.kind}, and an answer was expected")
        return frame

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
            found = self._each(lambda server, least=newest: self._pulled(server, into, whole=whole, version=least))  # type: ignore[misc]
            newest = max(version for version, _ in found)
            if all(version == newest for version, _ in found):
                return found
        self.mixed = True
        return found

    def _pulled(self, server: int, into: Sequence[Tensor | None], *, whole: bool, version: int) -> tuple[int, int]:
        """Read one server's variables, of that version or a later one."""
        key = (whole, *(None if tensor is None else tensor.data_ptr() for tensor in into))
        known, buffer = self._buffers.get(server, ((), None))
        if buffer is None or known != key:
            pairs = zip(into, self.shares.variables, strict=True)
            dtypes = [tensor.dtype for tensor, one in pairs if tensor is not None and one.kind == "param"]
            dtype = self._transfer or (dtypes[0] if dtypes else self.shares.master_dtype)  # the server rounds masters
            buffer = PullBuffer(self.shares.pieces[server], into, whole=whole, dtype=dtype)
            self._buffers[server] = key, buffer
        asked = {"version": version, "dtype": dtype_name(buffer.dtype), "skip": buffer.skip}
        told = self.ask(server, {}, VariableServer.pull, **asked)  # type: ignore[arg-type]
        self._tensors(server, buffer.memory)
        buffer.settle()
        version, loads = whole_numbers([told["version"], told["loads"]])
        return version, loads

    def pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Return the current rows of a trainable variable, (len(rows), ...), in the order of `rows`: (n,) int64,
        possibly with duplicates.

        Raises:
            LinkError: the connection to a server broke.
        """
        wanted, order = torch.unique(rows.detach().cpu(), return_inverse=True)
        variable, dtype = self.shares.variables[place], self._transfer or self.shares.master_dtype
        found = torch.empty((len(wanted), *variable.shape[1:]), dtype=dtype)

        def read(server: int, number: int, piece: RowShard) -> None:
            first, last = torch.searchsorted(wanted, torch.tensor([piece.start, piece.stop])).tolist()
            asked = {"rows": wanted[first:last] - piece.start}
            self.ask(server, asked, VariableServer.rows, piece=number, dtype=dtype_name(dtype))
            self._tensors(server, {"rows": found[first:last]})

        self._each_holder(place, read)
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
        master = self.shares.master_dtype
        narrow = [_sendable(one, self._transfer or master) for one in grads]
        sent = moved([*narrow, *(_sendable(one, master) for one in buffers)], torch.device("cpu"))
        fixed = len(self.shares.variables) - len(grads) - len(buffers)
        tensors = [*sent[: len(grads)], *[None] * fixed, *sent[len(grads) :]]

        def stage(server: int) -> None:
            parts: dict[str, Tensor] = {}
            for number, piece in enumerate(self.shares.pieces[server]):
                tensor = tensors[piece.place]
                if tensor is not None and tensor.is_sparse:
                    rows, narrow = tensor.indices()[0], row_dtype(piece.variable.num_rows)
                    first, last = torch.searchsorted(rows, torch.tensor([piece.start, piece.stop])).tolist()
                    parts[f"{number}.rows"] = (rows[first:last] - piece.start).to(narrow)
                    parts[f"{number}.values"] = tensor.values()[first:last]
                elif tensor is not None:
                    parts[str(number)] = in_memory_order(in_layout(piece.of(tensor), piece.strides))
            self.ask(server, parts, VariableServer.push, key=key)

        self._each(stage)

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
        refuse_mismatch({one.key: one.shape for one in self.shares.variables if one.saved}, tensors)

        def load(server: int) -> None:
            pieces = self.shares.pieces[server]
            trained = {piece.variable.name: piece for piece in pieces if piece.variable.kind == "param"}

            def send(key: str, tensor: Tensor) -> None:
                there = {"values": tensor.detach().contiguous()}
                self.links[server].send(VariableServer.load.__name__, {"key": key, "shape": list(tensor.shape)}, there)

            for piece in pieces:
                key = piece.variable.key
                held = tensors if key in tensors else unsaved or {}
                send(key, read_slice(held, key, piece.region).detach().to("cpu", piece.variable.dtype))
            for key in tensors:
                found = trained.get(name_in(key)) if key.startswith("optimizer/") else None
                if found is not None and "@" not in key.split("/")[1]:
                    is_part = shape_of(tensors, key) == found.variable.shape
                    send(key, (read_slice(tensors, key, found.region) if is_part else tensors[key]).cpu())
            self.ask(server, {}, VariableServer.start, version=version)

        self._each(load)

    def state(self) -> dict[str, Tensor]:
        """Return parameters, saved buffers and optimizer state as full tensors, named as in `replica_state`."""

        def read(server: int) -> list[tuple[RowShard, str, Tensor]]:
            found = []
            self.links[server].send(VariableServer.state.__name__)
            while (frame := self.answer(server, "tensor", "answer")).kind == "tensor":
                meta = expect_map(frame.meta, {"key": str, "shape": list})
                key, kinds = meta["key"], ("buffer",) if meta["key"].startswith("buffer/") else ("param", "frozen")
                named = [one for one in self.shares.pieces[server] if one.variable.name == name_in(key)]
                [piece] = [one for one in named if one.variable.kind in kinds]
                found.append((piece, key, self._tensors(server)["values"].view(meta["shape"])))
            return found

        whole: dict[str, Tensor] = {}
        for piece, key, tensor in [one for of_server in self._each(read) for one in of_server]:
            if piece.is_whole or tensor.shape != piece.shape:
                whole[key] = tensor
            else:
                full = whole.setdefault(key, torch.empty(piece.variable.shape, dtype=tensor.dtype))
                piece.of(full).copy_(tensor)
        keys = [variable.key for variable in self.shares.variables if variable.key in whole]
        return {key: whole[key] for key in dict.fromkeys([*keys, *whole])}

    def sum(self, keys: Sequence[str], options: SumOptions, *, exact: bool = False) -> Sum:
        """Sum staged gradients; the sum waits for `apply`, or for the next one; for the chief.

        Args:
            keys: one per shard of the step, in their order.
            options: the order of summation, and the operations on the sum.
            exact: compute the norm of a split variable from the full gradient, which is transferred for that: it then
                equals that of one device to the last bit. Else norms of parts are combined, which rounds differently.
        """

        def ask(server: int) -> tuple[bool, bool, dict[int, Tensor]]:
            told = self.ask(server, {}, VariableServer.sum, keys=list(keys), **asdict(options))
            found, pieces = self._tensors(server), self.shares.pieces[server]
            numbers = found["pieces"].tolist() if found else []
            norms = zip(numbers, found.get("norms", ()), strict=True)
            return bool(told["finite"]), bool(told["others"]), {pieces[number].place: norm for number, norm in norms}

        answers = self._each(ask)
        parts: dict[int, list[Tensor]] = {}
        for _, _, of_place in answers:
            for place, norm in of_place.items():
                parts.setdefault(place, []).append(norm)
        whole = [torch.zeros((), dtype=self.shares.master_dtype)]
        for place in sorted(parts):
            if len(parts[place]) == 1:
                whole.append(parts[place][0])
            elif exact:
                whole.append(torch._foreach_norm([self._whole(place)], 2.0)[0])  # noqa: SLF001 - as in torch's clipping
            else:
                whole.append(torch.linalg.vector_norm(torch.stack(parts[place])))
        total: Tensor = torch.linalg.vector_norm(torch.stack(whole[1:] or whole))
        return Sum(all(one for one, _, _ in answers), all(other for _, other, _ in answers), total)

    def apply(
        self,
        *,
        version: int,
        lr_factor: float,
        factor: float = 1.0,
        buffer_factor: float = 1.0,
        keys: Sequence[str] | None = None,
    ) -> None:
        """Make an update of the last sum, on all servers (`VariableServer.apply`); for the chief.

        Raises:
            TrainingError: an optimizer refuses such gradients, or one of the keys does not exist.
        """
        self._all(
            VariableServer.apply,
            version=version,
            lr_factor=lr_factor,
            factor=factor,
            buffer_factor=buffer_factor,
            keys=None if keys is None else list(keys),
        )

    def discard_staged(self, keys: Sequence[str]) -> None:
        """Discard staged gradients of these names, if they exist; for the chief.

        A server does not do this by itself: gradients of a dead worker may be reported, and must then be applied by all
        servers.
        """
        self._all(VariableServer.drop, keys=list(keys))

    def shutdown(self) -> None:
        """End the servers; for the chief."""
        self._all(VariableServer.shutdown)

    def _all(
        self, verb: Callable[Concatenate[VariableServer, Request, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self._each(lambda server: self.ask(server, {}, verb, *args, **kwargs))

    def _each(self, request: Callable[[int], T], servers: Sequence[int] | None = None) -> list[T]:
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

    def _each_holder(self, place: int, request: Callable[[int, int, RowShard], None]) -> None:
        """Run a request on the servers that hold rows of a variable, with the number of that piece there."""
        held = {
            server: (number, piece)
            for server, pieces in enumerate(self.shares.pieces)
            for number, piece in enumerate(pieces)
            if piece.place == place
        }
        self._each(lambda server: request(server, *held[server]), list(held))

    def _whole(self, place: int) -> Tensor:
        """Return the full gradient of a split variable in the last sum."""
        whole = torch.empty(self.shares.variables[place].shape, dtype=self.shares.master_dtype)

        def read(server: int, number: int, piece: RowShard) -> None:
            self.ask(server, {}, VariableServer.total, piece=number)
            self._tensors(server, {"total": piece.of(whole)})

        self._each_holder(place, read)
        return in_layout(whole, self.shares.variables[place].strides)  # a norm sums in the order of the memory

    def _tensors(self, server: int, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Read the tensors of the last answer of a server."""
        return self.links[server].tensors(self.shares.most_bytes(server), into)


def _sendable(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient in the dtype of the transfer; a sparse one coalesced."""
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce() if grad.sparse_dim() == 1 else grad.to_dense()
    return None if grad is None else grad.detach().to(dtype)
