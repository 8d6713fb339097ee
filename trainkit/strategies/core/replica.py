"""One replica of a synchronous strategy: the model, its devices, its optimizer, and other state that a step needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor

from trainkit.adapters.average import AVERAGE, swap
from trainkit.errors import CheckpointError, TrainingError
from trainkit.numerics.generators import hash64
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Batch, LocalModel, Numerics, PhaseListener, ignore_phase
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.reducers.vector import Reducer
from trainkit.strategies.tensor_shards import ShardedState, ShardSlice, TensorShard, meta_of, name_in, read_slice
from trainkit.strategies.tensors.layouts import FlatBuffer, Placement, TensorPlaces, local_part

JoinNorms = Callable[[Tensor, Sequence[int], float], Tensor]
"""(norms of this rank's parts of gradients, their indices, order of the norm) -> norms of the gradients; collective."""


def joined_norms(
    counted: Mapping[str, bool],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    among: Sequence[str] = (),
    are_whole: bool = False,
) -> JoinNorms:
    """Return a function that combines norms of parts into norms of full tensors.

    Args:
        counted: parameters of this rank -> whether its part counts here.
        device: the device for collectives.
        group: the ranks that hold parts; None: all.
        among: all parameters with gradients, where ranks have some of them: then the norms of all are returned.
        are_whole: whether each counted gradient is whole, so that its norm needs no power.
    """
    names, local = list(among or counted), list(counted)
    numbers, counts = {name: index for index, name in enumerate(names)}, list(counted.values())

    @lru_cache(maxsize=4)
    def on_device(indices: tuple[int, ...], norm_device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (present gradients,) their indices, and whether they count here: copied to the device once."""
        written = torch.tensor([counts[index] for index in indices], dtype=torch.bool, device=norm_device)
        return torch.tensor([numbers[local[index]] for index in indices], dtype=torch.int64, device=device), written

    def join(norms: Tensor, indices: Sequence[int], order: float) -> Tensor:
        """Return the norms; collective, without synchronisation with the device."""
        all_norms = torch.zeros(len(names), dtype=norms.dtype, device=device)
        chosen, written = on_device(tuple(indices), norms.device)
        if order == float("inf"):  # values that are not finite must remain, and a maximum may drop a NaN
            all_norms[chosen] = torch.where(torch.isfinite(norms), norms, order).to(device)
            dist.all_reduce(all_norms, op=dist.ReduceOp.MAX, group=group)
            return all_norms if among else all_norms[chosen]
        power = 1.0 if are_whole else order
        all_norms[chosen] = (norms**power * written).to(device)
        dist.all_reduce(all_norms, group=group)
        joined: Tensor = (all_norms if among else all_norms[chosen]) ** (1 / power)
        return joined

    return join


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A model on its devices."""

    model: nn.Module
    params: dict[str, nn.Parameter]
    """Trainable parameters of the model by canonical name."""
    masters: dict[str, nn.Parameter]
    """The parameters that the optimizer updates: `params` itself, or copies in higher precision."""

    def restricted(self, names: Container[str]) -> PlacedModel:
        """Return the same model with some of its trainable parameters."""
        params = {name: param for name, param in self.params.items() if name in names}
        masters = {name: self.masters[name] for name in params}
        return PlacedModel(model=self.model, params=params, masters=params if self.masters is self.params else masters)


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """The parts of a replica."""

    placed: PlacedModel
    """The model on its devices."""
    device: torch.device
    """The device on which batches must be."""
    device_types: tuple[str, ...]
    """The types of all devices that the model is on."""
    placement: Placement | None = None
    """The device of each tensor; None: `device`."""
    data_ranks: Collective
    """Sums of small tensors over the data ranks."""
    all_ranks: Collective
    """Sums of small tensors over all processes of the run."""
    precision: Precision
    """The precision of the training."""
    stepper: OptimizerStepper
    """Object that steps the optimizer over the masters."""
    buffers: StepBuffers
    """Buffers that the forward pass updates."""
    keys: BlockKeys
    """Keys of the model's randomness."""
    step_metrics: dict[str, float] | None = None
    """Object that receives the measurements of a step; None: a replica has its own."""
    reducer: Reducer
    """The reducer that sums the partial sums of a step."""
    another_reducer: Callable[[], Reducer]
    """Function that makes another reducer of this kind, for a part of the parameters; collective."""
    numerics: Numerics
    """The `numerics` settings."""
    draws: bool = True
    """Whether the model or the objective may draw random numbers, so that each shard needs its key."""
    on_phase: PhaseListener = ignore_phase
    """Callback that receives (phase, step) when forward, backward, reduce or update begins."""
    refuses_unused: bool = False
    """Whether a parameter without a gradient is an error."""
    is_grouped: bool = False
    """Whether a single rank exchanges its gradients as well."""
    join_norms: JoinNorms | None = None
    """Function that returns the norms of full gradients, if ranks hold parts of the gradients or only some of them."""
    cuts: Mapping[str, ShardSlice] = field(default_factory=dict)
    """The slice of each parameter, trainable or not, that this rank holds; empty if the replica is whole."""
    reload: Callable[[], None] = lambda: None
    """Called when parameters were replaced, so that the model frees gathered copies."""


class Replica(LocalModel):
    """A model on one or several devices, or the parts of one on this rank, and other state that a step needs.

    Parts in `params` and `masters` are plain tensors in the memory of the model's own parameters: the optimizer, its
    kernels and the update are those of a whole replica.
    """

    def __init__(self, parts: ReplicaParts) -> None:
        self.parts_made_of = parts
        """The parts of this replica."""
        super().__init__(
            model=parts.placed.model,
            device=parts.device,
            device_types=parts.device_types,
            data_ranks=parts.data_ranks,
            all_ranks=parts.all_ranks,
            precision=parts.precision,
            lanes=parts.reducer.lanes,
            step_metrics={} if parts.step_metrics is None else parts.step_metrics,
        )
        self.params = parts.placed.params
        """Trainable parameters of the model by canonical name."""
        self.masters = parts.placed.masters
        """The parameters that the optimizer updates: `params` itself, or copies in higher precision."""
        self.stepper, self.buffers, self.keys = parts.stepper, parts.buffers, parts.keys
        self.reducer, self.numerics, self.on_phase = parts.reducer, parts.numerics, parts.on_phase
        self.refuses_unused, self.join_norms = parts.refuses_unused, parts.join_norms
        self.cuts, self.reload = parts.cuts, parts.reload
        self.owners = dict(parts.placed.model.named_parameters())
        """The model's own parameters, which get the gradients of backward, by canonical name."""
        self.stand_in: Batch = None
        """A batch for steps in which this rank has none but must take part in collectives."""
        self.packing: FlatBuffer | None = None
        """The layout of the exchange of a step; None before the first step."""
        self.used: list[bool] = []
        """Whether each parameter gets a gradient, as found in the first step."""
        self.some_unused = False
        """Whether a parameter gets no gradient."""
        self.sparse: dict[int, int] | None = None
        """Index of each sparse gradient -> its sparse dims; None until a step has found them."""
        self.exchanged: list[int] | None = None
        """Indices of the gradients that the reducer sums; None: all."""
        self.exchanges = self.num_ranks > 1 or self.lanes is not None or parts.is_grouped
        """Whether a step sums over ranks or lanes; without it, its reducer is not called."""
        self.draws = parts.draws
        self.judges_updates = parts.numerics.leaves_out or self.loss_scale.moves
        """Whether a step makes no update if a gradient is not finite."""
        mixes = parts.precision.compute_dtype is not parts.precision.model_dtype
        self.autocast: Callable[[], AbstractContextManager[Any]] = (
            partial(parts.precision.autocast, parts.device_types) if mixes else nullcontext
        )
        """Makes the context of a forward pass and its loss."""
        self._seed: tuple[tuple[float, torch.dtype], Tensor] | None = None
        self._sums: list[Tensor | None] | None = None
        """Gradients of a lane's earlier shards, if masters are separate."""
        self._update_begun = -1
        """The latest step whose update has begun."""
        self._update_ended = -1
        """The latest step whose update has ended."""

    def restricted(self, names: Container[str], stepper: OptimizerStepper) -> Self:
        """Return a replica of the same model that computes and updates some of its parameters; collective.

        Both have their own buffers of a step, exchange and loss scale; they share the measurements of a step.

        Args:
            names: names of the parameters.
            stepper: steps their optimizers.
        """
        parts = self.parts_made_of
        placed, reducer = parts.placed.restricted(names), parts.another_reducer()
        buffers = StepBuffers(placed.model, parts.precision.master_dtype)
        parts = replace(parts, placed=placed, stepper=stepper, buffers=buffers, reducer=reducer)
        if self.cuts:
            counted = {name: self.cuts[name].is_written for name in placed.params}
            parts = replace(parts, join_norms=joined_norms(counted, self.device))
        return type(self)(replace(parts, step_metrics=self.step_metrics))

    @property
    def counted_parts(self) -> Mapping[str, bool] | None:
        """Whether this rank counts its part of each parameter in sums over ranks; None if it holds whole parameters."""
        return {name: self.cuts[name].is_written for name in self.params} if self.cuts else None

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of all parameters, trainable or not, for a checkpoint."""
        masters = self.masters
        return {name: masters[name] if name in masters else local_part(self.owners[name]) for name in self.cuts}

    def owns(self, name: str) -> bool:  # noqa: ARG002 - a rank may have some alone
        """Return whether this rank writes a tensor that several hold whole."""
        return self.is_rank0

    def set_stand_in(self, batch: Batch) -> None:
        """Store a batch for steps in which this rank has none."""
        self.stand_in = batch

    def agree_on_used(self, has_grads: Sequence[bool]) -> None:
        """Store which parameters get gradients on any rank, the first time; collective then.

        Args:
            has_grads: whether each parameter got one here, in the order of `params`.
        """
        if not self.used:
            rows = self.data_ranks.gather(torch.tensor(has_grads, dtype=torch.int64))
            self.set_exchange(used=torch.stack(rows).amax(0).bool().tolist(), sparse={})

    def set_exchange(self, *, used: Sequence[bool], sparse: dict[int, int], exchanged: list[int] | None = None) -> None:
        """Store which parameters get gradients, and which of these the reducer sums (by default all) or are sparse."""
        self.used, self.some_unused = list(used), not all(used)
        self.sparse, self.exchanged = sparse, exchanged

    def set_sparse(self, sparse: dict[int, int] | None) -> None:
        """Store which gradients are sparse."""
        self.sparse = sparse

    def set_packing(self, packing: FlatBuffer) -> None:
        """Store the layout of the exchange of a step."""
        self.packing = packing

    def use_stepper(self, stepper: OptimizerStepper) -> None:
        """Use another optimizer from now on."""
        self.stepper = stepper

    def adopt_layout(self, other: Replica) -> None:
        """Copy the layout of gradients and buffers that another replica of the same model has found."""
        assert other.packing is not None
        self.used, self.some_unused = other.used, other.some_unused
        self.sparse, self.exchanged = other.sparse, other.exchanged
        if self.buffers is not other.buffers:
            self.buffers.settle_like(other.buffers)
        self.packing = other.packing.on(self.device)

    def backward_seed(self, factor: float, total: Tensor) -> Tensor:
        """Return the start gradient of backward: () the factor, with dtype and device of the loss; shared by steps."""
        if self._seed is None or self._seed[0] != (factor, total.dtype):
            self._seed = (factor, total.dtype), torch.full_like(total, factor, requires_grad=False)
        return self._seed[1]

    def run_backward(self, loss: Tensor, seed: Tensor) -> None:
        """Add the gradients of a () loss, multiplied by a () seed, to those of the parameters.

        This is what `Tensor.backward` calls in the end: its checks of arguments cost a tenth of a small model's step.
        If all tensors are on the CPU, autograd runs in the calling thread and needs no copy of that thread's context,
        which costs another twentieth. In that case, torch's debug logs of autograd list no nodes.
        """
        if self.device_types == ("cpu",):
            Variable._execution_engine.run_backward((loss,), (seed,), False, False, (), True, True)  # noqa: SLF001
        else:
            _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def begin_update(self, step: int) -> None:
        """Record that an update of parameters, buffers and optimizer begins."""
        self._update_begun = step

    def end_update(self, step: int) -> None:
        """Record that the update is complete."""
        self._update_ended = step

    def recover(self, step: int) -> bool:
        """Restore the buffers that the forward passes of an interrupted step have changed.

        Args:
            step: updates completed, as the training counts them.

        Returns:
            Whether parameters and optimizer are those after that many updates. Only updates of this process count:
            before the first one, the state is that of a checkpoint.
        """
        if not self._update_begun == self._update_ended == step - 1:
            return False
        self.buffers.recover()
        self.take_grads()  # drop those of the interrupted step
        return True

    def places_of(self, names: Sequence[str]) -> TensorPlaces | None:
        """Return the places of parameters and buffers by name; None if all are on one device."""
        placement = self.parts_made_of.placement
        return None if placement is None else placement.places_of(names)

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """Return the whole gradient of a parameter, of which this rank has `grad`; collective if that is a part."""
        like = self.owners[name]
        if not isinstance(like, DTensor):
            return grad
        part = DTensor.from_local(
            grad.to(self.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return part.full_tensor()

    def refuse_changed_params(self, step: int, *, flags: bool = True) -> None:
        """Raise if code of the user has changed parameters; gathered ones stand in their places for a while."""
        if self.cuts and self.guard.change(flags=flags) is not None:
            self.reload()
        self.guard.refuse_change(step, flags=flags)

    @cached_property
    def reduced_names(self) -> list[str]:
        """The names of the parameters whose gradients the reducer sums."""
        names = list(self.params)
        return names if self.exchanged is None else [names[index] for index in self.exchanged]

    @cached_property
    def masters_apart(self) -> bool:
        """Whether the optimizer updates copies of the parameters."""
        return self.masters is not self.params

    @cached_property
    def reduced(self) -> list[nn.Parameter]:
        """The parameters whose gradients the reducer sums: those of the model, which backward reaches."""
        return [self.owners[name] for name in self.reduced_names]

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """The parameters in canonical order."""
        return list(self.params.values())

    @cached_property
    def _trained_owners(self) -> list[nn.Parameter]:
        """The model's own parameters that are trained, in canonical order."""
        return [self.owners[name] for name in self.params]

    def take_grads(self) -> list[Tensor | None]:
        """Return the (parts of) gradients accumulated since the last call, in the masters' dtype; None for a parameter
        without.
        """
        if self.masters_apart:
            sums, self._sums = self._sums, None
            return sums or [None] * len(self.params)
        grads, frozen = [param.grad for param in self._trained_owners], self.guard.frozen if self.cuts else ()
        if frozen and (late := [name for name in self.owners if name in frozen and self.owners[name].grad is not None]):
            # set in a forward pass, on the gathered parameter: the shard keeps its flag
            raise TrainingError(self.guard.refusal(f"requires_grad of {', '.join(late[:5])} was changed to True"))
        for param in self._trained_owners:
            param.grad = None
        return [None if grad is None else local_part(grad) for grad in grads] if self.cuts else grads

    def hold_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Store gradients in the masters' dtype that were accumulated elsewhere, for `take_grads`."""
        if self.masters_apart:
            self._sums = list(grads)
            return
        for param, grad in zip(self.trained, grads, strict=True):
            param.grad = grad

    def accumulate_in_masters(self) -> None:
        """Add the shard's gradients to `sums`: in bfloat16, adding shards would lose most of the later ones."""
        sums = self._sums or [None] * len(self.params)
        for index, (param, master) in enumerate(zip(self.params.values(), self.masters.values(), strict=True)):
            if param.grad is not None:
                earlier = sums[index]  # the sum rounds like that of a widened gradient, which would be one more tensor
                sums[index] = param.grad.to(master.dtype) if earlier is None else earlier.add_(param.grad)
                param.grad = None
        self._sums = sums

    def swap_averages(self) -> bool:
        """Exchange parameters and their averages; return whether there are any here."""
        has_averages = swap(self.stepper.optimizers)
        self.refresh_params()
        self.reload()
        return has_averages

    @torch.no_grad()
    def refresh_params(self) -> None:
        """Copy the masters, rounded, to the parameters of the forward pass."""
        if self.masters_apart:
            torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))


def make_master_params(model: nn.Module, precision: Precision, spread: Placement) -> dict[str, nn.Parameter]:
    """Return copies for the optimizer to update if the dtype of the parameters would lose small updates; else empty."""
    if precision.model_dtype is precision.master_dtype:
        return {}
    named = ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    dtype = precision.master_dtype
    return {name: nn.Parameter(param.detach().to(spread.device_of(name), dtype, copy=True)) for name, param in named}


def replica_state(replica: Replica) -> dict[str, Tensor]:
    """Return parameters in the masters' dtype, buffers that the model saves, and optimizer slots; no copies.

    Of sharded ones, the parts of this rank.
    """
    frozen = {name: param for name, param in replica.owners.items() if name in replica.guard.frozen}
    params = replica.parts or {**replica.masters, **frozen}
    state = {f"param/{name}": param.detach() for name, param in params.items()}
    return {**state, **_saved_buffers(replica), **replica.stepper.state(replica.masters)}


def _saved_buffers(replica: Replica) -> dict[str, Tensor]:
    saved = replica.model.state_dict(keep_vars=True)
    named = ((name, buffer) for name, buffer in replica.model.named_buffers() if not buffer.is_meta)
    return {f"buffer/{name}": local_part(buffer) for name, buffer in named if name in saved}


def sharded_state(replica: Replica) -> ShardedState:
    """Return the shards of this rank, and the tensors that several hold whole, if it is their owner."""
    shards: dict[str, tuple[TensorShard, ...]] = {}
    for key, tensor in replica_state(replica).items():
        name, cut = name_in(key), replica.cuts.get(name_in(key))
        if cut is None or key.startswith("buffer/") or tuple(tensor.shape) != cut.size:
            # buffers and step counts are the same on every rank
            if replica.owns(name):
                shards[key] = (TensorShard.whole(tensor),)
        elif cut.is_written and tensor.numel():
            shards[key] = (cut.piece(tensor),)
    return shards


def restore_replica(replica: Replica, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a checkpoint of any strategy; of sharded ones, no more than the parts of this rank is read.

    Raises:
        CheckpointError: a parameter or buffer is missing, unknown, or of another shape.
    """
    state, cuts = replica_state(replica), {f"param/{name}": cut for name, cut in replica.cuts.items()}
    state = {key: tensor for key, tensor in state.items() if not key.startswith("optimizer/")}
    refuse_mismatch({key: cuts[key].shape if key in cuts else tuple(state[key].shape) for key in state}, tensors)
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(read_slice(tensors, key, cuts[key].region) if key in cuts else tensors[key])
    replica.refresh_params()
    replica.stepper.restore(replica.masters, _Local(tensors, replica.cuts) if cuts else tensors)
    replica.reload()


class _Local(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each reduced to this rank's part on access."""

    def __init__(self, wholes: Mapping[str, Tensor], cuts: Mapping[str, ShardSlice]) -> None:
        self._wholes, self._cuts = wholes, cuts

    def __getitem__(self, key: str) -> Tensor:
        cut = self._cuts.get(name_in(key))
        if cut is None or tuple(meta_of(self._wholes, key).shape) != cut.shape:  # a step count is not sharded
            return self._wholes[key]
        return read_slice(self._wholes, key, cut.region).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wholes)

    def __len__(self) -> int:
        return len(self._wholes)


_LIKE_PARAM: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "ax", "prev", AVERAGE}
)
"""Slots of torch's optimizers with the shape of the parameter, which fused kernels do not check."""


def _misshapen_slots(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for key in tensors:
        kind, _, rest = key.partition("/")
        slot, _, name = rest.partition("/")
        shape = shapes.get(f"param/{name}")
        if kind != "optimizer" or shape is None:
            continue
        saved_shape = tuple(meta_of(tensors, key).shape)
        slot = slot.partition("@")[0]
        if slot in _LIKE_PARAM and saved_shape != shape:
            yield f"{key} is {saved_shape} there and {shape} here"
        elif slot == "step" and math.prod(saved_shape) != 1:
            yield f"{key} is {saved_shape} there, and one number was expected"


def refuse_mismatch(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Refuse the tensors of a checkpoint of another model, before any is read.

    Raises:
        CheckpointError: one is missing, unknown, or of another shape; up to five are named.
    """
    lines = [f"{key} is missing there" for key in shapes if key not in tensors]
    prefixes = ("optimizer/", "callback/")
    lines += [f"{key} is not in this model" for key in tensors if key not in shapes and not key.startswith(prefixes)]
    lines += [
        f"{key} is {tuple(meta_of(tensors, key).shape)} there and {shape} here"
        for key, shape in shapes.items()
        if key in tensors and tuple(meta_of(tensors, key).shape) != shape
    ]
    lines += _misshapen_slots(shapes, tensors)
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(lines[:5])}{more}.")


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK: Final = 1 << 22
"""Elements hashed at a time: the integers of a large parameter would take twice its memory."""


def bits_hash(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, each element times an odd number derived from its index, modulo 2^64, as
    int64.

    One changed bit always changes it, because multiplication by an odd number is invertible.

    Example:
        >>> int(bits_hash(torch.tensor([0.0, 0.0]))), bool(bits_hash(torch.ones(2)) == bits_hash(torch.ones(2)))
        (0, True)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        factors = torch.arange(start, start + part.numel(), device=tensor.device).mul_(2 * 0x9E3779B97F4A7C1).add_(1)
        total += factors.mul_(part).sum()
    return total


def drifted_parameter(replica: Replica) -> str | None:
    """Return the first parameter that differs in any bit between ranks with the same part of it, with these ranks;
    collective.

    If most ranks agree, the others are named; otherwise all but the first.
    """
    named: Mapping[str, Tensor] = replica.parts
    if not named:
        apart = replica.masters.items() if replica.masters_apart else ()
        named = {**replica.owners, **{f"{name} (its master)": master for name, master in apart}}
    hashes = torch.stack([bits_hash(tensor).to(replica.device) for tensor in named.values()]).tolist()
    rows = {name: [0, -1] for name in replica.owners}  # of another stage
    for name, bits in zip(named, hashes, strict=True):
        # a signed number holds 63 bits
        rows[name] = [bits, hash64(*replica.cuts[name].offset) >> 1 if replica.cuts else 0]
    ranks = replica.all_ranks if replica.cuts else replica.data_ranks
    gathered = torch.cat(ranks.gather(torch.tensor([[*rows.values()]]))).tolist()
    wrong = dict[str, dict[int, int]]()
    for index, name in enumerate(rows):
        for part in dict.fromkeys(row[index][1] for row in gathered):
            hash_of = {rank: row[index][0] for rank, row in enumerate(gathered) if row[index][1] == part}
            if len({*hash_of.values()}) > 1:
                wrong.setdefault(name, hash_of)
    if not wrong:
        return None
    name, hash_of = next(iter(wrong.items()))
    usual = max(hash_of.values(), key=Counter(hash_of.values()).__getitem__)  # the first of the most frequent
    others = [str(rank) for rank, value in hash_of.items() if value != usual]
    first = next(rank for rank, value in hash_of.items() if value == usual)
    where = f"rank{'' if len(others) == 1 else 's'} {', '.join(others)} from rank {first}"
    where += ", which holds the same part of it" if replica.cuts else ""
    more = "" if len(wrong) == 1 else f", as do {len(wrong) - 1} more parameters"
    return f"the parameter {name} differs on {where}{more}."
