"""A server: it holds rows of the variables with their optimizer, sums gradients of workers, and applies updates.

Each verb of the protocol is a method of `VariableServer`: its annotations are the types of a request, which
`ParameterServerClient.ask` takes from there as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Event, Lock
from typing import Any, Final, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from trainkit.errors import LinkError
from trainkit.numerics.batch import lane_order
from trainkit.strategies.base import JsonMap, PhaseListener, ignore_phase
from trainkit.strategies.core.optimizer import NamedSteppers, Updater
from trainkit.strategies.core.step import with_values
from trainkit.strategies.reducers.vector import DeterministicReducer
from trainkit.strategies.tensors.layouts import FlatBuffer, find_sparse, view_of
from trainkit.strategies.updates.links import DTYPES, AuthenticatedListener, Connection, new_bytes
from trainkit.strategies.updates.variables import RowShard, VariableShards

CHIEF: Final = "chief"
"""Name of the only task whose requests may change the state."""
_POLL_S: Final = 0.5
_MOST_STAGED: Final = 4096
"""Limit of the gradients that are staged at a time."""
_MOST_KEPT: Final = 4
"""Limit of the buffers that are kept for later pushes."""
_NAME_LENGTH: Final = 1024
Parts = list[Tensor | None]
"""One tensor per piece of the server, in order; None if it has none."""
MakeStepper = Callable[[Mapping[str, nn.Parameter]], Updater]


def lane_sum(shards: Sequence[Sequence[Tensor | None]], lanes: int | None, packing: FlatBuffer) -> Parts:
    """Return the sum over the shards of a step, in the same order as `mirrored`; without lanes, one shard after
    another. The gradients of shards are changed.

    Example:
        >>> packing = FlatBuffer([torch.Size([])], torch.float32, torch.device("cpu"))
        >>> lane_sum([[torch.tensor(1.0)], [None], [torch.tensor(2.0)]], 8, packing)
        [tensor(3.)]
    """
    if lanes is None:
        return _in_order(shards)
    dense = [[one.to_dense() if one is not None and one.is_sparse else one for one in shard] for shard in shards]
    reducer = DeterministicReducer(lanes=lanes, rank=0, num_ranks=1)
    reducer.begin(packing, num_shards=len(dense))
    for lane in lane_order(lanes):
        if lane < len(dense):
            reducer.add(lane, _in_order(dense[lane::lanes]))
    return list(reducer.finish())


def _in_order(shards: Sequence[Sequence[Tensor | None]]) -> Parts:
    total = list(shards[0])
    for more in shards[1:]:
        for place, (left, right) in enumerate(zip(total, more, strict=True)):
            if left is None or right is None:
                total[place] = right if left is None else left
            elif left.is_sparse:
                total[place] = (left + right).coalesce() if right.is_sparse else right.add_(left)
            else:
                left.add_(right)
    return total


class ServerShard:
    """The rows of a server. Not thread-safe: the caller holds the server's lock.

    Master parameters are contiguous in memory, which is sent directly. An update during a send goes to a copy, so that
    neither waits for the other: a worker that stops while reading blocks no other.
    """

    def __init__(self, pieces: Sequence[RowShard], dtype: torch.dtype, make_stepper: MakeStepper) -> None:
        self.pieces = tuple(pieces)
        self.params = [piece for piece in pieces if piece.variable.kind == "param"]
        self.version: int | None = None
        self.loads = 0
        shapes, strides = [torch.Size(one.shape) for one in self.params], [one.strides for one in self.params]
        self._packing = FlatBuffer(shapes, dtype, torch.device("cpu"), strides=strides)
        self._flat = self._packing.empty()
        self._readers = Counter[int]()
        """Number of clients that read a memory, by its address; while there are any, it does not change."""
        views = zip(self.params, self._packing.views(self._flat), strict=True)
        self.masters = {piece.variable.name: nn.Parameter(view) for piece, view in views}
        self._rest = [torch.zeros(one.shape, dtype=one.variable.dtype) for one in pieces[len(self.params) :]]
        self._stepper = make_stepper(self.masters) if self.masters else None
        self._rounded: dict[torch.dtype, Tensor] = {}

    def begin_read(self, skip: Collection[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pieces by number, in memory that does not change until `end_read` of the memory."""
        if dtype is not self._packing.dtype and dtype not in self._rounded:
            self._rounded[dtype] = self._flat.to(dtype)
        flat, offsets, count = self._rounded.get(dtype, self._flat), self._packing.offsets, len(self.params)
        self._readers[flat.data_ptr()] += 1
        found = {str(n): flat[offsets[n] : offsets[n + 1]] for n in range(count) if n not in skip}
        rest = {str(n): one.clone() for n, one in enumerate(self._rest, start=count) if n not in skip}
        return flat, {**found, **rest}

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SumOptions:
    """The operations on a sum of gradients, in this order."""

    lanes: int | None = None
    """Number of lanes of the order of summation; None: one shard after another."""
    weight_factor: float | None = None
    """Factor of the sum: the divisor over the counted weight."""
    check_finite: bool = False
    """Check whether every number of the gradients is finite."""
    check_others: bool = False
    """Check whether finite buffers stay finite."""
    unscale: float | None = None
    """Factor of the sum: one over the loss scale."""
    norms: bool = False
    """Return the norm of each gradient."""


class RequestRejectedError(Exception):
    """A request that cannot be answered; the message is sent to the requesting task."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client, apart from the arguments of the verb."""

    link: Connection
    tensors: dict[str, Tensor]
    memory: list[Tensor]
    """The memory of the tensors."""

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
        self._held = ServerShard(self._pieces, self._dtype, make_stepper)
        self._most_bytes = shares.most_bytes(index)
        self._on_phase, self._timeout_s = on_phase, timeout_s
        self._changed = Condition()
        self._loading: dict[str, Tensor] = {}
        self._staged: dict[str, tuple[Parts, list[Tensor]]] = {}
        """Gradients by name, each with its memory."""
        self._total: Parts = []
        """The last sum, in the memory of the first of its gradients."""
        self._summed: list[Tensor] = []
        """The memory of the gradients of the last sum."""
        self._had_gradient: set[int] = set()
        self._free: list[Tensor] = []
        """Memory for later pushes: a newly allocated large buffer costs more than the copy into it."""
        self._free_lock = Lock()

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
        frame, memory = link.receive(), list[Tensor]()
        if frame.kind not in _REQUESTS and not (link.peer == CHIEF and frame.kind in _VERBS):
            link.close()
            raise LinkError(f"{link.peer} requested {frame.kind}, which it may not request")
        verb, types = _VERBS[frame.kind]

        def allocate(size: int) -> Tensor:
            memory.append(self._take(size) if verb is VariableServer.push else new_bytes(size))
            return memory[0]

        tensors = link.tensors(self._most_bytes, allocate=allocate)
        try:
            verb(self, Request(link, tensors, memory), **_checked(frame.meta, types))
        except RequestRejectedError as error:
            link.send("refused", {"why": str(error)})
        except (RuntimeError, ValueError, TypeError, LookupError) as error:  # an optimizer without such gradients
            link.send("refused", {"why": f"{type(error).__name__}: {error}"[:2000]})

    def layout(self, request: Request, *, digest: str) -> None:
        """Check that a client has the same variables and the same partition."""
        if digest != self._digest:
            raise RequestRejectedError(f"{request.link.peer} has another model, or another number of servers")
        request.answer()

    def pull(self, request: Request, *, version: int, dtype: str, skip: list[int]) -> None:
        """Send the pieces, except for some, once they have this version; trainable ones in this dtype."""
        with self._changed:
            self._await(version)
            memory, tensors = self._held.begin_read(set(skip), DTYPES[dtype])
            told = {"version": self._held.version, "loads": self._held.loads}
        try:
            request.answer(told, tensors)
        finally:
            with self._changed:
                self._held.end_read(memory)

    def rows(self, request: Request, *, piece: int, dtype: str) -> None:
        """Send some rows of a trainable piece."""
        held, rows = self._held.params[piece], request.tensors["rows"]
        if len(rows) and not (rows.min() >= 0 and rows.max() < held.shape[0]):
            raise RequestRejectedError("rows: there are no such rows")
        with self._changed:
            self._await(0)
            found = self._held.masters[held.variable.name].detach().index_select(0, rows).to(DTYPES[dtype])
        request.answer({}, {"rows": found})

    def push(self, request: Request, *, key: str) -> None:
        """Stage a gradient; it replaces one of the same name.

        Tensors are named by the number of the piece: dense gradients and sums of buffers, rows and values of sparse
        ones (`3`, `4.rows`, `4.values`).
        """
        parts: Parts = [None] * len(self._pieces)
        for name, tensor in request.tensors.items():
            text, _, what = name.partition(".")
            number = int(text) if text.isdecimal() else -1
            piece = self._pieces[number]
            if number < 0 or piece.variable.kind == "frozen":
                raise RequestRejectedError(f"push: {name} is not a gradient of a trained variable")
            if what == "rows":
                parts[number] = self._sparse(piece, tensor, request.tensors[f"{text}.values"])
            elif not what:
                parts[number] = view_of(tensor.to(self._dtype), piece.shape, piece.strides)
        find_sparse(parts)  # else torch warns, once an optimizer makes such tensors
        with self._changed:
            if key not in self._staged and len(self._staged) >= _MOST_STAGED:
                raise RequestRejectedError(f"{_MOST_STAGED} gradients wait already")
            self._discard([key])
            self._staged[key] = parts, request.memory
        request.answer()

    def sum(
        self,
        request: Request,
        *,
        keys: list[str],
        lanes: int | None,
        weight_factor: float | None,
        unscale: float | None,
        norms: bool,
        check_finite: bool,
        check_others: bool,
    ) -> None:
        """Sum staged gradients, with `SumOptions`; the sum waits for `apply`, or for the next one."""
        present = self._sum(keys, lanes)
        if weight_factor is not None and present:
            torch._foreach_mul_(present, torch.tensor(weight_factor, dtype=self._dtype))
        finite = not check_finite or all(bool(norm.isfinite()) for norm in _norms(present, float("inf")))
        if unscale is not None and present:
            torch._foreach_mul_(present, unscale)
        with self._changed:
            others = not check_others or self._held.stays_finite(self._total)
        found = {}
        if norms and present:
            grads = enumerate(self._total[: len(self._held.params)])
            numbers = [number for number, grad in grads if grad is not None and _has_numbers(grad)]
            found = {"pieces": torch.tensor(numbers), "norms": torch.stack(_norms(present, 2.0))}
        request.answer({"finite": finite, "others": others}, found)

    def total(self, request: Request, *, piece: int) -> None:
        """Send the part of the last sum that belongs to a piece."""
        found = self._total[piece]
        if found is None or found.is_sparse:
            raise RequestRejectedError("total: this server does not hold all of it")
        request.answer({}, {"total": found.contiguous()})

    def apply(
        self,
        request: Request,
        *,
        version: int,
        lr_factor: float,
        factor: float,
        buffer_factor: float,
        keys: list[str] | None,
    ) -> None:
        """Make an update of the last sum.

        Args:
            request: the request.
            version: the version of the variables afterwards.
            lr_factor: factor of every learning rate.
            factor: factor of the gradients.
            buffer_factor: factor of the sums of floating-point buffers.
            keys: sum these gradients first; empty: only the version changes.
        """
        self._on_phase("update", version)
        if keys is not None:
            self._sum(keys, None)
        with self._changed:
            _, present = with_values(self._total[: len(self._held.params)])
            if factor != 1.0 and present:
                torch._foreach_mul_(present, torch.tensor(factor, dtype=self._dtype))
            self._held.update(self._total, version=version, lr_factor=lr_factor, buffer_factor=buffer_factor)
            self._forget_sum()
            self._changed.notify_all()
        self._on_phase("idle", version)
        request.answer()

    def drop(self, request: Request, *, keys: list[str]) -> None:
        """Discard staged gradients, if they exist."""
        with self._changed:
            self._discard(keys)
        request.answer()

    def load(self, request: Request, *, key: str, shape: list[int]) -> None:
        """Take a tensor of a checkpoint, for `start`; no answer."""
        self._loading[key] = request.tensors["values"].view(shape)

    def start(self, request: Request, *, version: int) -> None:
        """Begin with the variables that were sent; what was staged before is discarded."""
        with self._changed:
            loading, self._loading = self._loading, {}
            self._held.load(loading, version)
            self._forget_sum()
            self._discard(list(self._staged))
            self._changed.notify_all()
        request.answer()

    def state(self, request: Request) -> None:
        """Send all tensors of a checkpoint, one after the other."""
        for key, tensor in self._held.state():
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
        held = self._held

        def is_there() -> bool:
            return self._ended.is_set() or (held.version is not None and held.version >= version)

        found = self._changed.wait_for(is_there, self._timeout_s)
        if self._ended.is_set():
            raise LinkError("the run is over")
        if not found:
            now = "nothing" if held.version is None else f"version {held.version}"
            why = f"version {version} was not reached within {self._timeout_s:g} s: the server holds {now}"
            raise RequestRejectedError(why)

    def _sparse(self, piece: RowShard, rows: Tensor, values: Tensor) -> Tensor:
        in_order = rows.numel() == 0 or (rows[0] >= 0 and rows[-1] < piece.num_rows and bool((rows.diff() > 0).all()))
        if not in_order:
            raise RequestRejectedError("push: row indices that do not exist, or are not in order")
        values = values.to(self._dtype).view(len(rows), *piece.shape[1:])
        indices = rows.long().unsqueeze(0)
        return torch.sparse_coo_tensor(indices, values, piece.shape, is_coalesced=True, check_invariants=False)

    def _sum(self, keys: list[str], lanes: int | None) -> list[Tensor]:
        """Sum staged gradients into `_total`; return the gradients of it that exist, values of sparse ones."""
        with self._changed:
            missing = [key for key in keys if key not in self._staged]
            if missing:
                raise RequestRejectedError(f"there is no gradient {missing[0]}")
            self._forget_sum()
            taken = [self._staged.pop(key) for key in keys]
            self._summed = [memory for _, memories in taken for memory in memories]
        if not taken:
            return []
        pieces, count = self._pieces, len(self._held.params)
        shapes, strides = [torch.Size(piece.shape) for piece in pieces], [piece.strides for piece in pieces]
        packing = FlatBuffer(shapes, self._dtype, torch.device("cpu"), strides=strides)
        total = lane_sum([parts for parts, _ in taken], lanes, packing)
        if lanes is not None:  # zeros for pieces that had a gradient in an earlier step only, as in a vector exchange
            now = {n for n in range(len(pieces)) if any(parts[n] is not None for parts, _ in taken)}
            self._had_gradient |= {number for number in now if number < count}
            total = [one if n in now or n in self._had_gradient else None for n, one in enumerate(total)]
        grads, present = with_values(total[:count])
        self._total = [*grads, *total[count:]]
        return present

    def _forget_sum(self) -> None:
        self._give(self._summed)
        self._total, self._summed = [], []

    def _discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._give(self._staged.pop(key, ([], []))[1])

    def _take(self, size: int) -> Tensor:
        with self._free_lock:
            for place, memory in enumerate(self._free):
                if memory.numel() == size:
                    return self._free.pop(place)
        return new_bytes(size)

    def _give(self, memory: Sequence[Tensor]) -> None:
        with self._free_lock:
            self._free = [*self._free, *memory][:_MOST_KEPT]


def _has_numbers(grad: Tensor) -> bool:
    return bool((grad.values() if grad.is_sparse else grad).numel())


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
        RequestRejectedError: one is missing, or has another type.
    """
    for name, kind in types.items():
        if name not in meta or not _fits(meta[name], kind):
            raise RequestRejectedError(f"{name} is not {kind}")
    return {name: meta[name] for name in types}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of a request has the type of an annotation: counts, numbers, names, flags, or lists."""
    inner = get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if inner:  # or None
        return value is None or _fits(value, inner[0])
    if kind is float:
        return type(value) in (int, float)
    is_long = value > 2**53 or value < 0 if type(value) is int else kind is str and len(str(value)) > _NAME_LENGTH
    return type(value) is kind and not is_long
