"""A server holds rows of the variables with their optimizer, sums gradients of workers, and applies updates; a client
sends a request to all servers at once, to each for its part.

Each verb of the protocol is a method of `VariableServer`: its annotations are the types of a request, which
`ParameterServerClient.ask` takes from there as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from trainkit.errors import LinkError, TrainingError
from trainkit.files import expect_map, whole_numbers
from trainkit.numerics.batch import lane_order
from trainkit.strategies.base import JsonMap, PhaseListener, ignore_phase
from trainkit.strategies.core.copies import total_of
from trainkit.strategies.core.optimizer import NamedSteppers, OptimizerStepper
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.core.step import with_values
from trainkit.strategies.reducers.vector import DeterministicReducer
from trainkit.strategies.tensor_shards import meta_of, name_in, read_slice
from trainkit.strategies.tensors.layouts import FlatBuffer, find_sparse, in_layout, in_memory_order, row_dtype, view_of
from trainkit.strategies.tensors.staging import ByteLayout, TensorKind, host_bytes, moved
from trainkit.strategies.updates.links import DTYPES, AuthenticatedListener, Connection, Frame, dtype_name
from trainkit.strategies.updates.variables import RowShard, VariableShards

CHIEF: Final = "chief"
"""Name of the only task whose requests may change the state, and of the worker in its own process."""
_POLL_S: Final = 0.5
_MOST_STAGED: Final = 4096
"""Limit of the gradients that are staged at a time."""
_NAME_LENGTH: Final = 1024
Parts = list[Tensor | None]
"""One tensor per piece of the server, in order; None if it has none."""
MakeStepper = Callable[[Mapping[str, nn.Parameter]], OptimizerStepper]


def lane_sum(shards: Sequence[Sequence[Tensor | None]], lanes: int, packing: FlatBuffer) -> Parts:
    """Return the sum over the shards of a step, in the same order as `mirrored`; without lanes (0), one shard after
    another. The gradients of shards are changed.

    Example:
        >>> packing = FlatBuffer([torch.Size([])], torch.float32, torch.device("cpu"))
        >>> lane_sum([[torch.tensor(1.0)], [None], [torch.tensor(2.0)]], 8, packing)
        [tensor(3.)]
    """
    if not lanes:
        return total_of(shards)
    dense = [[grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in shard] for shard in shards]
    reducer = DeterministicReducer(lanes=lanes, rank=0, num_ranks=1)
    reducer.begin(packing, num_shards=len(dense))
    for lane in lane_order(lanes):
        if lane < len(dense):
            reducer.add(lane, total_of(dense[lane::lanes]))
    return list(reducer.finish())


class ServerShard:
    """The rows of a server. Not thread-safe: the caller holds the server's lock.

    Master parameters are contiguous in memory, which is sent directly. An update during a send goes to a copy, so that
    neither waits for the other: a worker that stops while reading blocks no other.
    """

    def __init__(self, pieces: Sequence[RowShard], dtype: torch.dtype, make_stepper: MakeStepper) -> None:
        self.pieces = tuple(pieces)
        self.params = [piece for piece in pieces if piece.variable.kind == "param"]
        self.version = -1
        """Number of updates; -1: nothing was loaded yet."""
        self.loads = 0
        shapes, strides = [torch.Size(piece.shape) for piece in self.params], [piece.strides for piece in self.params]
        self._packing = FlatBuffer(shapes, dtype, torch.device("cpu"), strides=strides)
        self._flat = self._packing.empty()
        self._readers = Counter[int]()
        """Number of clients that read a memory, by its address; while there are any, it does not change."""
        views = zip(self.params, self._packing.views(self._flat), strict=True)
        self.masters = {piece.variable.name: nn.Parameter(view) for piece, view in views}
        self._rest = [torch.zeros(piece.shape, dtype=piece.variable.dtype) for piece in pieces[len(self.params) :]]
        self._stepper = make_stepper(self.masters) if self.masters else None
        self._rounded: dict[torch.dtype, Tensor] = {}

    def begin_read(self, skip: Collection[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pieces by number, in memory that does not change until `end_read` of the memory."""
        if dtype is not self._packing.dtype and dtype not in self._rounded:
            self._rounded[dtype] = self._flat.to(dtype)
        flat, offsets, count = self._rounded.get(dtype, self._flat), self._packing.offsets, len(self.params)
        self._readers[flat.data_ptr()] += 1
        params = {str(n): flat[offsets[n] : offsets[n + 1]] for n in range(count) if n not in skip}
        rest = {str(n): tensor.clone() for n, tensor in enumerate(self._rest, start=count) if n not in skip}
        return flat, {**params, **rest}

    def end_read(self, memory: Tensor) -> None:
        """Let the memory change again."""
        self._readers[memory.data_ptr()] -= 1

    @torch.no_grad()
    def update(self, gradient: Parts, *, version: int, lr_factor: float, buffer_factor: float = 1.0) -> None:
        """Step the optimizer and replace the buffers by scaled sums; an empty gradient only sets the version."""
        count = len(self.params)
        if gradient and self._stepper is not None:
            self._copy_on_write()
            if isinstance(self._stepper, NamedSteppers):
                self._stepper.begin_step(version - 1)
            with torch.enable_grad():  # optimizers expect to be called with grad enabled
                self._stepper.step(gradient[:count], lr_factor)
        for piece, tensor, total in zip(self.pieces[count:], self._rest, gradient[count:], strict=False):
            if total is not None and not tensor.is_floating_point():
                tensor.add_(total.round().to(tensor.dtype))
            elif total is not None and piece.variable.is_added:
                tensor.copy_(tensor + total)
            elif total is not None:
                tensor.copy_(total if buffer_factor == 1.0 else total * buffer_factor)
        self.version = version

    def stays_finite(self, sums: Parts) -> bool:
        """Return whether finite buffers stay finite in their sums."""
        pairs = zip(self._rest, sums[len(self.params) :], strict=False)
        floats = [(tensor, total) for tensor, total in pairs if total is not None and tensor.is_floating_point()]
        return all(bool(total.isfinite().all()) or not bool(tensor.isfinite().all()) for tensor, total in floats)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint names and rows of this server; no copies."""
        for piece, tensor in zip(self.pieces, [*self.masters.values(), *self._rest], strict=True):
            if piece.variable.saved:
                yield piece.variable.key, tensor.detach()
        if self._stepper is not None:
            yield from self._stepper.state(self.masters).items()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load rows by their names in a checkpoint."""
        self._copy_on_write()
        for piece, tensor in zip(self.pieces, [*self.masters.values(), *self._rest], strict=True):
            tensor.copy_(tensors[piece.variable.key])
        if self._stepper is not None:
            self._stepper.restore(self.masters, tensors)
        self.version = version
        self.loads += 1

    def _copy_on_write(self) -> None:
        """Prepare a change of the masters: if a client is still reading them, go on in a copy."""
        self._rounded.clear()
        if self._readers[self._flat.data_ptr()]:
            self._flat = self._flat.clone()
            for master, view in zip(self.masters.values(), self._packing.views(self._flat), strict=True):
                master.data = view
        self._readers += Counter()  # drops those of memory that nobody reads


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client, apart from the arguments of the verb."""

    link: Connection
    tensors: dict[str, Tensor]

    def answer(self, meta: JsonMap | None = None, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send the answer."""
        self.link.send("answer", meta, tensors)


class VariableServer:
    """A server's variables and the gradients that workers have staged; the connections share one lock.

    Args:
        shares: the partition of the variables.
        index: the index of this server's shard.
        make_stepper: creates the optimizers over named parameters.
        on_phase: receives (phase, version): `update` when one begins, `idle` when it is finished.
        timeout_s: seconds that a pull waits for a version.
    """

    def __init__(
        self,
        shares: VariableShards,
        index: int,
        make_stepper: MakeStepper,
        on_phase: PhaseListener = ignore_phase,
        timeout_s: float = 60.0,
    ) -> None:
        self._ended = Event()
        self._broken: BaseException | None = None
        self._pieces, self._digest, self._dtype = shares.pieces[index], shares.digest, shares.master_dtype
        shapes, strides = [torch.Size(piece.shape) for piece in self._pieces], [piece.strides for piece in self._pieces]
        self._packing = FlatBuffer(shapes, self._dtype, torch.device("cpu"), strides=strides)
        self._shard = ServerShard(self._pieces, self._dtype, make_stepper)
        self._most_bytes = shares.most_bytes(index)
        self._on_phase, self._timeout_s = on_phase, timeout_s
        self._changed = Condition()
        self._loading: dict[str, Tensor] = {}
        self._staged: dict[str, Parts] = {}
        """Gradients by name."""
        self._total: Parts = []
        """The last sum, in the memory of the first of its gradients."""
        self._had_gradient: set[int] = set()

    def serve(self, listener: AuthenticatedListener, stopped: Callable[[], bool] = lambda: False) -> None:
        """Hold a shard of the variables until the chief requests the end.

        A server starts empty; pulls wait until the chief has loaded the variables.

        Args:
            listener: accepts the connections; closed when this returns.
            stopped: returns whether to end; called at intervals.

        Raises:
            LinkError: the chief's connection broke.
        """
        with listener:
            listener.serve(self._serve_client)
            while not self._ended.wait(_POLL_S):
                if stopped():
                    return
        if self._broken is not None:
            raise self._broken

    def _serve_client(self, link: Connection) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while not self._ended.is_set():
                self._serve_request(link)
        except BaseException as error:  # any error: without the chief nothing more can arrive
            if link.peer == CHIEF and not self._ended.is_set():
                self._broken = error
                self._ended.set()
            raise

    def _serve_request(self, link: Connection) -> None:
        frame = link.receive()
        if frame.kind not in _REQUESTS and not (link.peer == CHIEF and frame.kind in _VERBS):
            link.close()
            raise LinkError(f"{link.peer} requested {frame.kind}, which it may not request")
        verb, types = _VERBS[frame.kind]
        tensors = link.tensors(self._most_bytes)
        try:
            verb(self, Request(link, tensors), **_checked(frame.meta, types))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:  # an optimizer without such gradients
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            link.send("refused", {"why": f"{kind}{error}"[:2000]})

    def layout(self, request: Request, *, digest: str) -> None:
        """Check that a client has the same variables and the same partition."""
        if digest != self._digest:
            raise ValueError(f"{request.link.peer} has another model, or another number of servers")
        request.answer()

    def pull(self, request: Request, *, version: int, dtype: str, skip: list[int]) -> None:
        """Send the pieces, except for some, once they have this version; trainable ones in this dtype."""
        with self._changed:
            self._await(version)
            memory, tensors = self._shard.begin_read(set(skip), DTYPES[dtype])
            meta = {"version": self._shard.version, "loads": self._shard.loads}
        try:
            request.answer(meta, tensors)
        finally:
            with self._changed:
                self._shard.end_read(memory)

    def rows(self, request: Request, *, piece: int, dtype: str) -> None:
        """Send some rows of a trainable piece."""
        row_shard, rows = self._shard.params[piece], request.tensors["rows"]
        if len(rows) and not (rows.min() >= 0 and rows.max() < row_shard.shape[0]):
            raise ValueError("rows: there are no such rows")
        with self._changed:
            self._await(0)
            values = self._shard.masters[row_shard.variable.name].detach().index_select(0, rows).to(DTYPES[dtype])
        request.answer({}, {"rows": values})

    def push(self, request: Request, *, key: str) -> None:
        """Stage a gradient; it replaces one of the same name.

        Tensors are named by the number of the piece: dense gradients and sums of buffers, rows and values of sparse
        ones (`3`, `4.rows`, `4.values`).
        """
        parts: Parts = [None] * len(self._pieces)
        for name, tensor in request.tensors.items():
            text, _, suffix = name.partition(".")
            number = int(text) if text.isdecimal() else -1
            piece = self._pieces[number]
            if number < 0 or piece.variable.kind == "frozen":
                raise ValueError(f"push: {name} is not a gradient of a trained variable")
            if suffix == "rows":
                parts[number] = self._sparse(piece, tensor, request.tensors[f"{text}.values"])
            elif not suffix:
                parts[number] = view_of(tensor.to(self._dtype), piece.shape, piece.strides)
        find_sparse(parts)  # else torch warns, once an optimizer makes such tensors
        with self._changed:
            if key not in self._staged and len(self._staged) >= _MOST_STAGED:
                raise ValueError(f"{_MOST_STAGED} gradients wait already")
            self._staged[key] = parts
        request.answer()

    def sum(
        self,
        request: Request,
        *,
        keys: list[str],
        lanes: int,
        factors: list[float],
        checks: bool,
        norms: bool,
    ) -> None:
        """Sum staged gradients; the sum waits for `apply`, or for the next one.

        Args:
            request: the request.
            keys: names of the gradients.
            lanes: number of lanes of the order of summation; 0: one gradient after another.
            factors: factors of the sum, one after another.
            checks: check whether every number of the gradients is finite, and whether finite buffers stay finite.
            norms: return the norm of each gradient.
        """
        present = self._sum(keys, lanes)
        for factor in factors if present else ():
            torch._foreach_mul_(present, torch.tensor(factor, dtype=self._dtype))
        finite = not checks or all(bool(norm.isfinite()) for norm in _norms(present, float("inf")))
        with self._changed:
            others = not checks or self._shard.stays_finite(self._total)
        tensors = {}
        if norms and present:
            grads = enumerate(self._total[: len(self._shard.params)])
            pairs = ((n, grad.values() if grad.is_sparse else grad) for n, grad in grads if grad is not None)
            numbers = [number for number, values in pairs if values.numel()]
            tensors = {"pieces": torch.tensor(numbers), "norms": torch.stack(_norms(present, 2.0))}
        request.answer({"finite": finite, "others": others}, tensors)

    def total(self, request: Request, *, piece: int) -> None:
        """Send the part of the last sum that belongs to a piece."""
        tensor = self._total[piece]
        if tensor is None or tensor.is_sparse:
            raise ValueError("total: this server does not hold all of it")
        request.answer({}, {"total": tensor.contiguous()})

    def apply(
        self,
        request: Request,
        *,
        version: int,
        lr_factor: float,
        factor: float,
        buffer_factor: float,
        keys: list[str],
    ) -> None:
        """Make an update of the last sum.

        Args:
            request: the request.
            version: the version of the variables afterwards.
            lr_factor: factor of every learning rate.
            factor: factor of the gradients.
            buffer_factor: factor of the sums of floating-point buffers.
            keys: sum these gradients first; none: they are summed already.
        """
        self._on_phase("update", version)
        if keys:
            self._sum(keys)
        with self._changed:
            _, present = with_values(self._total[: len(self._shard.params)])
            if factor != 1.0 and present:
                torch._foreach_mul_(present, torch.tensor(factor, dtype=self._dtype))
            self._shard.update(self._total, version=version, lr_factor=lr_factor, buffer_factor=buffer_factor)
            self._total = []
            self._changed.notify_all()
        self._on_phase("idle", version)
        request.answer()

    def drop(self, request: Request, *, keys: list[str]) -> None:
        """Discard staged gradients, if they exist."""
        with self._changed:
            for key in keys:
                self._staged.pop(key, None)
        request.answer()

    def load(self, request: Request, *, key: str, shape: list[int]) -> None:
        """Take a tensor of a checkpoint, for `start`; no answer."""
        self._loading[key] = request.tensors["values"].view(shape)

    def start(self, request: Request, *, version: int) -> None:
        """Begin with the variables that were sent; what was staged before is discarded."""
        with self._changed:
            loading, self._loading = self._loading, {}
            self._shard.load(loading, version)
            self._total = []
            self._staged.clear()
            self._changed.notify_all()
        request.answer()

    def state(self, request: Request) -> None:
        """Send all tensors of a checkpoint, one after the other."""
        for key, tensor in self._shard.state():
            request.link.send("tensor", {"key": key, "shape": list(tensor.shape)}, {"values": tensor.contiguous()})
        request.answer()

    def shutdown(self, request: Request) -> None:
        """End."""
        request.answer()
        self._ended.set()
        with self._changed:
            self._changed.notify_all()

    def _await(self, version: int) -> None:
        """Wait until the variables have this version; the caller holds the lock."""
        ready = self._changed.wait_for(lambda: self._ended.is_set() or self._shard.version >= version, self._timeout_s)
        if self._ended.is_set():
            raise LinkError("the run is over")
        if not ready:
            why = f"version {version} was not reached within {self._timeout_s:g} s: the server holds "
            raise ValueError(f"{why}version {self._shard.version}")

    def _sparse(self, piece: RowShard, rows: Tensor, values: Tensor) -> Tensor:
        in_order = rows.numel() == 0 or (rows[0] >= 0 and rows[-1] < piece.num_rows and bool((rows.diff() > 0).all()))
        if not in_order:
            raise ValueError("push: row indices that do not exist, or are not in order")
        values = values.to(self._dtype).view(len(rows), *piece.shape[1:])
        indices = rows.long().unsqueeze(0)
        return torch.sparse_coo_tensor(indices, values, piece.shape, is_coalesced=True, check_invariants=False)

    def _sum(self, keys: list[str], lanes: int = 0) -> list[Tensor]:
        """Sum staged gradients into `_total`; return the gradients of it that exist, values of sparse ones."""
        with self._changed:
            missing = [key for key in keys if key not in self._staged]
            if missing:
                raise ValueError(f"there is no gradient {missing[0]}")
            self._total = []
            taken = [self._staged.pop(key) for key in keys]
        count, total = len(self._shard.params), lane_sum(taken, lanes, self._packing)
        if lanes:  # zeros for pieces that had a gradient in an earlier step only, as in a vector exchange
            used = {n for n in range(len(total)) if any(parts[n] is not None for parts in taken)}
            self._had_gradient |= {number for number in used if number < count}
            total = [tensor if n in used or n in self._had_gradient else None for n, tensor in enumerate(total)]
        grads, present = with_values(total[:count])
        self._total = [*grads, *total[count:]]
        return present


def _norms(present: list[Tensor], order: float) -> list[Tensor]:
    return list(torch._foreach_norm(present, order)) if present else []  # noqa: SLF001 - as in torch's own clipping


_REQUESTS: Final = ("layout", "pull", "rows", "push")
"""The verbs of every client; the chief alone may use the others."""
_VERBS: Final[Mapping[str, tuple[Callable[..., None], dict[str, Any]]]] = {
    name: (verb, {key: kind for key, kind in get_type_hints(verb).items() if key not in ("request", "return")})
    for name, verb in vars(VariableServer).items()
    if callable(verb) and not name.startswith("_") and name != "serve"
}


def _checked(meta: JsonMap, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a verb.

    Raises:
        ValueError: one is missing, or has another type.
    """
    for name, kind in types.items():
        if name not in meta or not _fits(meta[name], kind):
            raise ValueError(f"{name} is not {kind}")
    return {name: meta[name] for name in types}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of a request has the type of an annotation: counts, numbers, names, flags, or lists."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if kind is float:
        return type(value) in (int, float)
    is_long = value > 2**53 or value < 0 if type(value) is int else kind is str and len(str(value)) > _NAME_LENGTH
    return type(value) is kind and not is_long


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
            target = into[piece.index]
            if target is None or (piece.variable.kind == "frozen" and not whole):
                self.skip.append(number)
                continue
            part = piece.of(target.detach())
            wire = dtype if piece.variable.kind == "param" else piece.variable.dtype
            fits = part.is_contiguous() if piece.strides is None else part.stride() == piece.strides
            if fits and part.device.type == "cpu" and part.dtype is wire:
                self.memory[str(number)] = in_memory_order(part)
            else:  # the server sends the memory of its piece in its own layout
                apart[str(number)] = part, TensorKind(torch.Size(piece.shape), wire, piece.strides)
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
        self.loads = 0
        """Number of loads of the servers at the last pull; 0: unknown."""
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

        If an update came in between, all servers are read again, so that the requests arrive at the same time.

        Args:
            into: one tensor per variable, which is overwritten; None: skip it (its rows are pulled by `pull_rows`).

        Returns:
            The version (number of updates) of the variables; the oldest if there are several (`mixed`).

        Raises:
            LinkError: the connection to a server broke.
        """
        attempts, least = 0, 0
        while True:
            whole = not self.loads
            pulled = self._each(partial(self._pull_server, into=into, whole=whole, version=least))
            versions, loads = ({pair[index] for pair in pulled} for index in (0, 1))
            if len(loads) > 1 or not (whole or self.loads in loads):
                self.loads, least = 0, 0
                continue
            [self.loads], attempts = loads, attempts + 1
            self.version, self.mixed, least = min(versions), len(versions) > 1, max(versions)
            if not self.mixed or attempts == _PULLS:
                return self.version

    def _pull_server(self, server: int, *, into: Sequence[Tensor | None], whole: bool, version: int) -> tuple[int, int]:
        """Read one server's variables, of that version or a later one."""
        key = (whole, *(None if tensor is None else tensor.data_ptr() for tensor in into))
        known_key, buffer = self._buffers.get(server, ((), None))
        if buffer is None or known_key != key:
            pairs = zip(into, self.shares.variables, strict=True)
            dtypes = [tensor.dtype for tensor, variable in pairs if tensor is not None and variable.kind == "param"]
            dtype = self._transfer or (dtypes[0] if dtypes else self.shares.master_dtype)  # the server rounds masters
            buffer = PullBuffer(self.shares.pieces[server], into, whole=whole, dtype=dtype)
            self._buffers[server] = key, buffer
        arguments = {"version": version, "dtype": dtype_name(buffer.dtype), "skip": buffer.skip}
        meta = self.ask(server, {}, VariableServer.pull, **arguments)  # type: ignore[arg-type]
        self._tensors(server, buffer.memory)
        buffer.settle()
        version, loads = whole_numbers([meta["version"], meta["loads"]])
        return version, loads

    def pull_rows(self, index: int, rows: Tensor) -> Tensor:
        """Return the current rows of a trainable variable, (len(rows), ...), in the order of `rows`: (n,) int64,
        possibly with duplicates.

        Raises:
            LinkError: the connection to a server broke.
        """
        unique, order = torch.unique(rows.detach().cpu(), return_inverse=True)
        variable, dtype = self.shares.variables[index], self._transfer or self.shares.master_dtype
        values = torch.empty((len(unique), *variable.shape[1:]), dtype=dtype)

        def read(server: int, number: int, piece: RowShard) -> None:
            first, last = torch.searchsorted(unique, torch.tensor([piece.start, piece.stop])).tolist()
            tensors = {"rows": unique[first:last] - piece.start}
            self.ask(server, tensors, VariableServer.rows, piece=number, dtype=dtype_name(dtype))
            self._tensors(server, {"rows": values[first:last]})

        self._each_holder(index, read)
        return values[order]

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
        narrow = [_sendable(grad, self._transfer or master) for grad in grads]
        sent = moved([*narrow, *(_sendable(buffer, master) for buffer in buffers)], torch.device("cpu"))
        fixed = len(self.shares.variables) - len(grads) - len(buffers)
        tensors = [*sent[: len(grads)], *[None] * fixed, *sent[len(grads) :]]

        def stage(server: int) -> None:
            parts: dict[str, Tensor] = {}
            for number, piece in enumerate(self.shares.pieces[server]):
                tensor = tensors[piece.index]
                if tensor is not None and tensor.is_sparse:
                    rows, narrow = tensor.indices()[0], row_dtype(piece.variable.num_rows)
                    first, last = torch.searchsorted(rows, torch.tensor([piece.start, piece.stop])).tolist()
                    parts[f"{number}.rows"] = (rows[first:last] - piece.start).to(narrow)
                    parts[f"{number}.values"] = tensor.values()[first:last]
                elif tensor is not None:
                    parts[str(number)] = in_memory_order(in_layout(piece.of(tensor), piece.strides))
            self.ask(server, parts, VariableServer.push, key=key)

        self._each(stage)

    def load_state(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Load the variables into the servers; for the chief.

        Args:
            tensors: parameters, buffers and the optimizer's state, from `replica_state`, and the buffers that no
                checkpoint holds (`unsaved_of`); read piece by piece.
            version: number of updates of the variables.

        Raises:
            CheckpointError: they belong to another model.
        """
        refuse_mismatch({variable.key: variable.shape for variable in self.shares.variables}, tensors)

        def load(server: int) -> None:
            pieces = self.shares.pieces[server]
            trained = {piece.variable.name: piece for piece in pieces if piece.variable.kind == "param"}

            def send(key: str, tensor: Tensor) -> None:
                values = {"values": tensor.detach().contiguous()}
                self.links[server].send(VariableServer.load.__name__, {"key": key, "shape": list(tensor.shape)}, values)

            for piece in pieces:
                key = piece.variable.key
                send(key, read_slice(tensors, key, piece.region).detach().to("cpu", piece.variable.dtype))
            for key in tensors:
                row_shard = trained.get(name_in(key)) if key.startswith("optimizer/") else None
                if row_shard is not None and "@" not in key.split("/")[1]:
                    is_part = meta_of(tensors, key).shape == row_shard.variable.shape
                    send(key, (read_slice(tensors, key, row_shard.region) if is_part else tensors[key]).cpu())
            self.ask(server, {}, VariableServer.start, version=version)

        self._each(load)

    def state(self) -> dict[str, Tensor]:
        """Return parameters, saved buffers and optimizer state as full tensors, named as in `replica_state`."""

        def read(server: int) -> list[tuple[RowShard, str, Tensor]]:
            entries, pieces = [], {piece.variable.name: piece for piece in self.shares.pieces[server]}
            self.links[server].send(VariableServer.state.__name__)
            while (frame := self.answer(server, "tensor", "answer")).kind == "tensor":
                meta = expect_map(frame.meta, {"key": str, "shape": list})
                piece, values = pieces[name_in(meta["key"])], self._tensors(server)["values"]
                entries.append((piece, meta["key"], values.view(meta["shape"])))
            return entries

        whole: dict[str, Tensor] = {}
        for piece, key, tensor in [entry for entries in self._each(read) for entry in entries]:
            if piece.is_whole or tensor.shape != piece.shape:
                whole[key] = tensor
            else:
                full = whole.setdefault(key, torch.empty(piece.variable.shape, dtype=tensor.dtype))
                piece.of(full).copy_(tensor)
        keys = [variable.key for variable in self.shares.variables if variable.key in whole]
        return {key: whole[key] for key in dict.fromkeys([*keys, *whole])}

    def sum(
        self,
        keys: Sequence[str],
        *,
        lanes: int = 0,
        factors: Sequence[float] = (),
        checks: bool = False,
        norms: bool = False,
    ) -> Sum:
        """Sum staged gradients on all servers (`VariableServer.sum`); for the chief.

        With lanes, the norm of a split variable is computed from the full gradient, which is transferred for that: it
        then equals that of one device to the last bit. Else norms of parts are combined, which rounds differently.

        Args:
            keys: one per shard of the step, in their order.
            lanes: see there, as all further arguments.
            factors: see there.
            checks: see there.
            norms: see there.
        """

        def ask(server: int) -> tuple[bool, bool, dict[int, Tensor]]:
            meta = self.ask(
                server,
                {},
                VariableServer.sum,
                keys=list(keys),
                lanes=lanes,
                factors=list(factors),
                checks=checks,
                norms=norms,
            )
            tensors, pieces = self._tensors(server), self.shares.pieces[server]
            numbers = tensors["pieces"].tolist() if tensors else []
            named = zip(numbers, tensors.get("norms", ()), strict=True)
            return bool(meta["finite"]), bool(meta["others"]), {pieces[number].index: norm for number, norm in named}

        answers = self._each(ask)
        part_norms: dict[int, list[Tensor]] = {}
        for _, _, by_index in answers:
            for index, norm in by_index.items():
                part_norms.setdefault(index, []).append(norm)
        variable_norms = [torch.zeros((), dtype=self.shares.master_dtype)]
        for index in sorted(part_norms):
            if len(part_norms[index]) == 1:
                variable_norms.append(part_norms[index][0])
            elif lanes:
                variable_norms.append(torch._foreach_norm([self._full_gradient(index)], 2.0)[0])  # noqa: SLF001 - as in torch's clipping
            else:
                variable_norms.append(torch.linalg.vector_norm(torch.stack(part_norms[index])))
        total: Tensor = torch.linalg.vector_norm(torch.stack(variable_norms[1:] or variable_norms))
        return Sum(all(finite for finite, _, _ in answers), all(others for _, others, _ in answers), total)

    def apply(
        self,
        *,
        version: int,
        lr_factor: float,
        factor: float = 1.0,
        buffer_factor: float = 1.0,
        keys: Sequence[str] = (),
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
            keys=list(keys),
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
        return [future.result() for future in futures]

    def _each_holder(self, index: int, request: Callable[[int, int, RowShard], None]) -> None:
        """Run a request on the servers that hold rows of a variable, with the number of that piece there."""
        holders = {
            server: (number, piece)
            for server, pieces in enumerate(self.shares.pieces)
            for number, piece in enumerate(pieces)
            if piece.index == index
        }
        self._each(lambda server: request(server, *holders[server]), list(holders))

    def _full_gradient(self, index: int) -> Tensor:
        """Return the full gradient of a split variable in the last sum."""
        whole = torch.empty(self.shares.variables[index].shape, dtype=self.shares.master_dtype)

        def read(server: int, number: int, piece: RowShard) -> None:
            self.ask(server, {}, VariableServer.total, piece=number)
            self._tensors(server, {"total": piece.of(whole)})

        self._each_holder(index, read)
        return in_layout(whole, self.shares.variables[index].strides)  # a norm sums in the order of the memory

    def _tensors(self, server: int, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Read the tensors of the last answer of a server."""
        return self.links[server].tensors(self.shares.most_bytes(server), into)


def _sendable(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient in the dtype of the transfer; a sparse one coalesced."""
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce() if grad.sparse_dim() == 1 else grad.to_dense()
    return None if grad is None else grad.detach().to(dtype)
