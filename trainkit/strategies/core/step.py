"""One step of a rank: forward and backward over its shards, and the update by the sums over all.

The update unscales, checks for overflow, clips and steps; the decision is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.errors import Problem, TrainingError, listed
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Collective, Loss, add_terms
from trainkit.strategies.base import Batch, LossWeighting, Status, StepContext, UpdateParams, UpdateTensors
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.object_snapshot import ObjectSnapshot
from trainkit.strategies.tensors.layouts import FlatBuffer, dense_strides, find_sparse, layout_mark, row_dtype

MOST_ELEMENTS: Final = 2**16
"""Elements of the largest gradient that is put aside; this many in total may be put aside in any model."""
_SHARE: Final = 16
"""Elements of all gradients divided by those of the gradients that are put aside, at least."""


class SmallGrads:
    """The sums over earlier shards of a step's small gradients, put aside during a backward pass.

    Autograd adds the gradient of a later shard to the sum of earlier ones with one launch per parameter: 161 per shard
    for a ResNet-50, of which 127 move less than 256 KiB. These sums are added to the gradients of a backward pass at
    once. Both are alive at the same time; therefore autograd still adds large gradients, and only the smallest ones are
    put aside, up to a share of all: those of a ResNet-50 are a thirtieth. The order of every sum, and so its bits, stay
    the same.

    Args:
        params: of the model.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.ones(2)
        >>> earlier = SmallGrads([weight])
        >>> (2.0 * weight).sum().backward()
        >>> weight.grad.tolist(), earlier.add_up(), weight.grad.tolist()
        ([2.0, 2.0], None, [3.0, 3.0])
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        dense = [(param, grad) for param in params if (grad := param.grad) is not None and grad.layout is torch.strided]
        budget = max(MOST_ELEMENTS, sum(grad.numel() for _, grad in dense) // _SHARE)
        for param, grad in sorted(dense, key=lambda pair: pair[1].numel()):
            budget -= grad.numel()
            if budget < 0 or grad.numel() > MOST_ELEMENTS:
                break
            self._sums.append((param, grad))
            param.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients of the backward pass to the sums, which become the gradients again."""
        totals: list[Tensor] = []
        grads: list[Tensor] = []
        for param, total in self._sums:
            grad, param.grad = param.grad, total
            if grad is None:
                continue  # this shard does not use the parameter
            if grad.layout is torch.strided:
                totals.append(total)
                grads.append(grad)
            else:
                total.add_(grad)
        if grads:
            torch._foreach_add_(totals, grads)


def gather_sparse(grad: Tensor | None, like: Tensor, *, sparse_dim: int, collective: Collective) -> tuple[Tensor, int]:
    """Return the sum of a sparse gradient over the ranks; collective.

    Every rank receives the rows of all ranks and adds equal rows in the order of the ranks: all get the same bits.

    Args:
        grad: this rank's sum over its shards, sparse; None if it had no shard.
        like: the parameter, which gives shape and device.
        sparse_dim: dims that the indices span.
        collective: the ranks.

    Returns:
        The coalesced sum, and the bytes that this rank sent to each other.
    """
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty((sparse_dim, 0), dtype=torch.int64, device=like.device),
            torch.empty((0, *like.shape[sparse_dim:]), dtype=like.dtype, device=like.device),
            like.shape,
        )
    local = grad.coalesce()
    narrow = row_dtype(max(like.shape[:sparse_dim]))
    indices = collective.gather(local.indices().t().to(narrow).contiguous())
    values = collective.gather(local.values())
    total = torch.sparse_coo_tensor(torch.cat(indices).t().long(), torch.cat(values), like.shape).coalesce()
    most = max(len(part) for part in indices)  # shorter ones are padded
    row = sparse_dim * narrow.itemsize + values[0][:1].numel() * values[0].element_size() if most else 0
    return total, most * row


def sparse_problems(model: nn.Module, why: str) -> list[Problem]:
    """Return problems of sparse embeddings; `why` names the problem with such gradients: "which are not summed"."""
    return [
        Problem(key="model", rule=f"{name} has sparse gradients, {why}. Use sparse=False.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]


def sparse_figures(totals: Mapping[int, Tensor], sent_bytes: int, num_ranks: int) -> dict[str, float]:
    """Return the metrics of the savings of a step by sparse exchange.

    Args:
        totals: sums of the sparse gradients over the ranks.
        sent_bytes: bytes that a rank sent to each other for them.
        num_ranks: ranks of the run.

    Returns:
        `sparse_density`: present elements over all elements; `sparse_saved_mb`: MiB that a rank did not send, compared
        with an all-reduce of the dense gradients, which sends 2 (n - 1) / n of them.
    """
    dense = sum(total.numel() for total in totals.values())
    dense_bytes = sum(total.numel() * total.element_size() for total in totals.values())
    present = sum(total.values().numel() for total in totals.values())
    saved = 2 * (num_ranks - 1) / num_ranks * dense_bytes - (num_ranks - 1) * sent_bytes
    return {"sparse_density": present / dense, "sparse_saved_mb": saved / 2**20}


def with_values(grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the gradients, sparse ones coalesced, and the tensors of their values.

    In-place operations on the second (scaling, clipping) change the first; norms over the second are those of the full
    gradients, because absent elements are zero. The second has no empty tensors.
    """
    coalesced = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in grads]
    tensors = [grad._values() if grad.is_sparse else grad for grad in coalesced if grad is not None]  # noqa: SLF001
    return coalesced, [values for values in tensors if values.numel()]


def cloned_batch(batch: Batch) -> Batch:
    """Copy a batch into separate memory.

    A view may have another alignment on another rank, and vectorized code then sums it in another order; and a model
    may write into its inputs, which a pass that is discarded must not change.
    """
    cloned: Batch = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch)
    return cloned


def added(total: Tensor | float, weight: Tensor | float) -> Tensor | float:
    """Return the sum of weights. The first one stays as it is: no kernel runs, and counts remain whole numbers.

    Example:
        >>> added(added(0.0, torch.tensor(3)), torch.tensor(2))
        tensor(5)
    """
    return total + weight if isinstance(total, Tensor) or total else weight


def total_weight(weights: Sequence[Tensor | float]) -> Tensor | float:
    """Add the weights of shards: many counts by two kernels, other weights in their order."""
    counts = [weight for weight in weights if isinstance(weight, Tensor) and not weight.is_floating_point()]
    return torch.stack(counts).sum() if len(counts) == len(weights) > 2 else reduce(added, weights)


def weight_on(weight: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (1,) a weight on a device; a number is written by a kernel, without synchronisation.

    Example:
        >>> weight_on(3.0, torch.float32, torch.device("cpu"))
        tensor([3.])
    """
    if isinstance(weight, Tensor):
        return weight.to(device, dtype).reshape(1)
    return torch.full((1,), weight, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class LossDivisor:
    """The divisor of the loss of a step before backward.

    A bare sum is never backpropagated: at a loss scale of 65536 the sum over 64 targets overflows fp16.
    """

    value: float
    """The total weight of the step if known or planned exactly, else a power of two near it."""
    counted: bool
    """Whether gradients must be multiplied by `value` divided by the summed counted weight: by 1 if they are equal."""

    @classmethod
    def of(cls, weighing: LossWeighting, batch_size: int) -> LossDivisor:
        """Return the divisor of a step of `batch_size` samples.

        Example:
            >>> LossDivisor.of(LossWeighting(per_sample=None, planned=60.0), 16)
            LossDivisor(value=1024.0, counted=True)
        """
        if weighing.per_sample is not None:
            return cls(weighing.per_sample * batch_size, counted=False)
        planned = weighing.planned * batch_size
        return cls(planned if weighing.exact else 2.0 ** round(math.log2(max(planned, 1.0))), counted=True)

    def factor(self, weight: Tensor) -> Tensor:
        """Return the factor of gradients for a counted weight, of its shape: 0 without a target.

        A number over a tensor would be a product with its reciprocal in torch, and not exactly 1 if both are equal.
        """
        return torch.nan_to_num(torch.full_like(weight, self.value) / weight, posinf=0.0)


divisor_of = lru_cache(maxsize=8)(LossDivisor.of)  # full batches and the short one: two values per training


class ShardStep:
    """One try at a step on one rank: its shards, and their sums for an update of `batch_size` samples."""

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        batch_size: int | None = None,
    ) -> None:
        self.replica, self.ticket, self.batches, self.training = replica, ticket, batches, training
        self.batch_size = training.plan.batch_size(ticket.step) if batch_size is None else batch_size
        self.divisor = divisor_of(training.weighing, self.batch_size)
        self.loss_sum: Tensor | None = None
        self.weight: Tensor | float = 0.0
        self.terms: dict[str, Tensor] = {}
        self._sparse: dict[int, Tensor | None] = {}
        self._lane_grads: list[Tensor | None] | None = None
        """The gradients of a lane's shards; None: the replica holds them."""

    def run(self) -> Sequence[Tensor | None]:
        """Return the step's gradients, updated buffers and counted weight, summed over shards and ranks; collective."""
        replica, reducer = self.replica, self.replica.reducer
        packing = replica.packing or self.agree_on_grad_layout()
        if replica.buffers.names:
            replica.buffers.begin_step()
        if replica.exchanges:
            reducer.begin(packing, num_shards=self.training.plan.num_shards(self.ticket.step))
            for lane, sums in self.partials():
                reducer.add(lane, sums)
            sums = reducer.finish()
        else:  # this rank has all shards, and autograd has added them up
            ((_, sums),) = self.partials()
        return sums if replica.exchanged is None else self._for_all_params(sums, replica.exchanged)

    def _for_all_params(self, sums: Sequence[Tensor | None], exchanged: Sequence[int]) -> list[Tensor | None]:
        """Return a gradient per parameter, then buffers and weight: reduced ones, sparse ones, None for unused ones.

        Collective if there are sparse gradients.
        """
        replica = self.replica
        grads: list[Tensor | None] = [None] * len(replica.params)
        for index, total in zip(exchanged, sums, strict=False):
            grads[index] = total
        if replica.sparse and replica.lanes is None:
            masters, totals, sent_bytes = list(replica.masters.values()), {}, 0
            for index, dims in replica.sparse.items():
                grad, collective = self._sparse.get(index), replica.data_ranks
                totals[index], size = gather_sparse(grad, masters[index], sparse_dim=dims, collective=collective)
                grads[index] = totals[index]
                sent_bytes += size
            replica.step_metrics.update(sparse_figures(totals, sent_bytes, replica.num_ranks))
        return [*grads, *sums[len(exchanged) :]]

    def partials(self) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
        """Yield (lane, its sums), computed on iteration: partial sums are combined before the next one exists."""
        lanes = self.replica.lanes
        numbered = zip(self.ticket.shards, self.batches, strict=True)
        if not self.ticket.shards:
            self._enter("reduce")
        elif lanes is None:
            yield 0, self._lane(list(numbered))
        else:
            for lane, shards in groupby(numbered, key=lambda item: item[0] % lanes):
                yield lane, self._lane([(shard, cloned_batch(batch)) for shard, batch in shards])

    def _lane(self, shards: Sequence[tuple[int, Batch]]) -> list[Tensor | None]:
        weights = [self._shard(shard, batch) for shard, batch in shards]
        weight = weights[0] if len(weights) == 1 else total_weight(weights)
        self.weight = added(self.weight, weight)
        if shards[-1][0] == self.ticket.shards[-1]:  # the exchange follows
            self._enter("reduce")
        return self._take_grads(weight)

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        """Run forward and backward of one shard into `.grad`; return its weight."""
        replica = self.replica
        self._enter("forward")
        loss = self._forward(shard, batch)
        self._enter("backward")
        if replica.buffers.names:
            replica.buffers.end_forward(self._shard_fraction(shard))
        total = loss.total
        if replica.exchanges:
            replica.reducer.begin_backward(replica.reduced, is_last=self._is_last(shard))
        earlier = None if replica.exchanges or len(self.ticket.shards) == 1 else SmallGrads(replica.trained)
        replica.run_backward(total, self._seed(total))
        if replica.exchanges:
            replica.reducer.end_backward()
        if earlier is not None:
            earlier.add_up()
        if replica.buffers.names:
            replica.buffers.reset()
        if replica.masters_apart:
            replica.accumulate_in_masters()
        loss_sum = loss.loss_sum.detach()
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        objective = self.training.objective
        if loss.terms is not None or objective.term_names:
            add_terms(self.terms, objective, loss)
        return loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight

    def _is_last(self, shard: int) -> bool:
        """Return whether the pass of a shard is the last one of this rank."""
        return self.ticket.shards[-1:] == (shard,)

    def _enter(self, phase: str) -> None:
        self.replica.on_phase(phase, self.ticket.step)

    def _shard_fraction(self, shard: int) -> float:
        """Return a shard's fraction of the step's samples."""
        return self.training.plan.shard_size(self.ticket.step, shard) / self.batch_size

    def _seed(self, total: Tensor) -> Tensor:
        """Return () the start gradient of backward: the derivative of (loss scale * mean loss) by the summed loss.

        The bits equal those of dividing the loss by the weight, as torch's own mean does, without two kernels.
        """
        return self.replica.backward_seed(self.replica.loss_scale.scale / self.divisor.value, total)

    def _forward(self, shard: int, batch: Batch) -> Loss:
        replica, training = self.replica, self.training
        if replica.draws:
            replica.keys.enter(step=self.ticket.step, shard=shard, objective=training.objective, part=training.draw_key)
        with replica.autocast():
            return training.loss(replica.model, batch, self.ticket.step, shard)

    def _take_grads(self, weight: Tensor | float) -> list[Tensor | None]:
        replica, lane_grads, self._lane_grads = self.replica, self._lane_grads, None
        taken = replica.take_grads() if lane_grads is None else lane_grads
        if replica.sparse is None:
            replica.set_sparse(find_sparse(taken))
        if replica.some_unused:
            self._refuse_late([grad is not None for grad in taken])
        if replica.sparse and replica.lanes is not None:  # they are summed in the order of dense vectors
            taken = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in taken]
        if replica.exchanged is not None:
            self._sparse = {index: taken[index] for index in replica.sparse or {}}
            taken = [taken[index] for index in replica.exchanged]
        if replica.buffers.names:
            taken.extend(replica.buffers.take())
        if self.divisor.counted:
            taken.append(weight_on(weight, replica.precision.master_dtype, replica.device))
        return taken

    def _refuse_late(self, has_grads: Sequence[bool]) -> None:
        for name, has_grad, was_used in zip(self.replica.params, has_grads, self.replica.used, strict=True):
            if has_grad and not was_used:
                raise TrainingError(
                    f"rank {self.replica.rank}, step {self.ticket.step}: the parameter {name} got a gradient, but had "
                    f"none in the first step of this run. Use it in every step, or freeze it."
                )

    def agree_on_grad_layout(self) -> FlatBuffer:
        """Find which parameters get gradients and which buffers are updated, and agree on it; collective, once.

        The first shard is computed and discarded; its random numbers are keyed, so the step itself is not affected. A
        single rank without exchange and buffers skips this.
        """
        replica = self.replica
        names, buffers = list(replica.params), replica.buffers
        exchanges = replica.exchanges
        flags = [0 if exchanges else 1] * len(names)
        dims = [0] * len(names)
        changed = [0.0] * len(buffers.names)
        if self.ticket.shards and (exchanges or buffers.names):
            attributes = ObjectSnapshot(replica.model.named_modules())
            with buffers.watch() as changed:
                loss = self._forward(self.ticket.shards[0], cloned_batch(self.batches[0]))
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]
            buffers.reset()
            attributes.restore()  # counters of the model do not include this pass
            if exchanges:
                grads = [param.grad for param in replica.params.values()]
                flags = [int(grad is not None) for grad in grads]
                dims = [find_sparse(grads).get(index, 0) for index in range(len(grads))]
            for param in replica.params.values():
                param.grad = None
        marks = [layout_mark(param) for param in replica.params.values()]
        param_places = replica.places_of(names)
        where = [0] * len(names) if param_places is None else param_places.places
        rows = torch.stack(replica.data_ranks.gather(torch.tensor([*marks, *where, *flags, *dims, *map(int, changed)])))
        count = len(names)
        _refuse_differences(names, rows[:, :count], rows[:, count : 2 * count])
        agreed: list[int] = rows[:, 2 * count :].amax(0).tolist()  # a rank without a shard finds nothing
        if exchanges:
            agree_on_exchanged_grads(replica, agreed[:count], agreed[count : 2 * count])
        buffers.settle(agreed[2 * count :])
        reduced, rest = replica.reduced, buffers.shapes()
        places = replica.places_of([*replica.reduced_names, *buffers.updated_names()])
        if self.divisor.counted:
            rest.append(torch.Size([1]))
            places = None if places is None else places.and_more(1)
        packing = FlatBuffer(
            [*(param.shape for param in reduced), *rest],
            replica.precision.master_dtype,
            replica.device,
            num_grads=len(reduced),
            strides=[*map(dense_strides, reduced), *[None] * len(rest)],
            places=places,
        )
        replica.set_packing(packing)
        return packing


def _refuse_differences(names: Sequence[str], marks: Tensor, places: Tensor) -> None:
    """Refuse parameters whose strides differ between ranks, because gradients are exchanged in memory order, or that
    two replicas have put on different devices of their groups.

    Args:
        names: names of the parameters.
        marks: (ranks, parameters) int, of their strides.
        places: (ranks, parameters) int, of their devices.

    Raises:
        TrainingError: there is such a parameter.
    """
    for values in (marks, places):
        for name, column in zip(names, values.t().tolist(), strict=True):
            rank = next((rank for rank, value in enumerate(column) if value != column[0]), None)
            if rank is not None and values is marks:
                rule = f"the parameter {name} has different strides on rank {rank} and on rank 0."
                raise TrainingError(f"{rule} Give it one memory format on every rank.")
            if rank is not None:
                where = f"on device {column[rank]} of its replica on rank {rank}, and on device {column[0]} on rank 0."
                raise TrainingError(f"the parameter {name} is {where} Set the place of each block in strategy.map.")


def agree_on_exchanged_grads(replica: Replica, used: Sequence[int], sparse_dims: Sequence[int]) -> None:
    """Store the layout of gradients that the ranks have found in their first shards.

    Args:
        replica: the replica that stores the layout.
        used: a flag per parameter, 0 if no rank found a gradient.
        sparse_dims: number of sparse dims of its gradient, 0 if it is dense.

    Raises:
        TrainingError: a parameter has no gradient, and the strategy does not allow that; or the optimizer does not
            support the dense gradients that a reproducible run needs.
    """
    some_unused = not all(used)
    if some_unused and replica.refuses_unused:
        raise TrainingError(_unused([name for name, flag in zip(replica.params, used, strict=True) if not flag]))
    sparse = {index: dims for index, dims in enumerate(sparse_dims) if dims}
    in_lanes = replica.lanes is not None
    if sparse and in_lanes and any(isinstance(opt, torch.optim.SparseAdam) for opt in replica.stepper.optimizers):
        raise TrainingError(
            "numerics.reproducible sums sparse gradients as dense ones, which torch.optim.SparseAdam refuses. "
            "Use Adam or Adagrad, or leave numerics.reproducible out."
        )
    apart = {} if in_lanes or not replica.exchanges else sparse
    exchanged = [index for index, flag in enumerate(used) if flag and index not in apart]
    replica.set_exchange(
        used=[bool(flag) for flag in used], sparse=sparse, exchanged=exchanged if some_unused or apart else None
    )


def _unused(names: list[str]) -> str:
    return (
        f"no gradient in the first step for {listed(names)}. Freeze what is not trained (requires_grad=False), or set "
        "strategy.allow_unused=true, which excludes it from the exchange."
    )


R = TypeVar("R", bound=Replica)

MakeStep = Callable[[R, Ticket, Sequence[Batch], StepContext], ShardStep]
"""Function that makes one try at a step of a replica."""


_LARGEST: Final = float("inf")
"""The order of the norm that is the largest element."""
Observe = Callable[[Sequence[Tensor | None]], None]
"""Function that receives the gradients of an update, in the order of the parameters."""


def apply_update(
    replica: Replica,
    sums: Sequence[Tensor | None],
    divisor: LossDivisor,
    update: UpdateParams,
    *,
    loss_sum: Tensor | None = None,
    observe: Observe | None = None,
) -> tuple[Status, Tensor | None]:
    """Update parameters, buffers and loss scale from the sums over all shards and ranks.

    Args:
        replica: its parameters, buffers, optimizer state and loss scale change.
        sums: gradients, then updated buffers, then the counted weight if there is one; consumed.
        divisor: the divisor of the loss.
        update: learning rate and clip of this update.
        loss_sum: () the loss of this rank, None if it had no shard.
        observe: called with the gradients before they are clipped and the update is made.

    Returns:
        The status of the step, and the global norm before clipping if it was needed, () on the device.

    Raises:
        LossScaleError: too many overflows in a row.
    """
    grads, count = sums[: len(replica.params)], len(replica.params)
    present = [grad for grad in grads if grad is not None]
    if replica.sparse:
        grads, present = with_values(grads)
    norms_of = partial(_norms, replica, grads, present)
    if divisor.counted:
        counted = sums[-1]
        assert counted is not None
        # where reading is free of a wait, a product with 1 is left out: 30 us of a small model's step of 400
        if counted.device.type != "cpu" or counted.tolist() != [divisor.value]:
            _scale(present, divisor.factor(counted).squeeze(0))
    scale = replica.loss_scale
    if scale.scale != 1.0:
        torch._foreach_mul_(present, 1.0 / scale.scale)
    status, norms = Status.applied, None if update.max_norm is None else norms_of(2.0)
    buffers = sums[count : len(sums) - int(divisor.counted)] if replica.buffers.names else []
    if replica.judges_updates:
        status = _decided(replica, buffers, loss_sum, norms_of(_LARGEST) if norms is None else norms)
        if norms is not None and status is not Status.applied:
            # in fp32 the squares of gradients above 1.8e19, which are finite, are not
            status = _decided(replica, buffers, loss_sum, norms_of(_LARGEST))
    if status is not Status.applied:
        if replica.buffers.names:
            replica.buffers.reset()
        replica.set_loss_scale(scale.after(overflow=True) if status is Status.retry else scale.after_skip())
        return status, None
    if observe is not None:
        observe(grads)
    norm = None if norms is None or update.max_norm is None else _clip(present, norms, update.max_norm)
    replica.stepper.step(grads, update.lr_factor)
    if replica.masters_apart:
        replica.refresh_params()
    if replica.buffers.names:
        replica.buffers.finish(buffers)
    if replica.judges_updates:
        replica.set_loss_scale(scale.after(overflow=False))
    return Status.applied, norm


def observer(replica: Replica, training: StepContext, step: int) -> Observe | None:
    """Return a function that passes the gradients of a step to the listener of the training, if it wants them."""
    listener = training.on_gradients
    if listener is None or not listener.wants(step):
        return None

    def observe(grads: Sequence[Tensor | None]) -> None:
        named = zip(replica.params, grads, strict=True)
        present = {name: grad for name, grad in named if grad is not None}
        tensors = UpdateTensors(
            grads=present, weights=replica.masters, counted=replica.counted_parts, ranks=replica.all_ranks
        )
        listener.take(step, tensors)

    return observe


def _decided(replica: Replica, buffers: Sequence[Tensor | None], loss_sum: Tensor | None, norms: Tensor) -> Status:
    """Decide whether to make an update: whether gradients with these norms are finite; synchronises with the device.

    Where a step may be left out, loss and buffers count, too, and the ranks agree: collective.
    """
    if not replica.numerics.leaves_out:
        return Status.applied if torch.isfinite(norms.max()).item() else Status.retry
    beyond_scaling = [] if loss_sum is None else [~torch.isfinite(loss_sum).all()]
    beyond_scaling += replica.buffers.became_nonfinite(buffers) if replica.buffers.names else []
    return _agreed(replica, beyond_scaling, norms)


def _agreed(replica: Replica, beyond_scaling: Sequence[Tensor], norms: Tensor) -> Status:
    """Decide on a step by the values of all ranks, with the same result on all of them; collective.

    A smaller loss scale helps if gradients overflow, but not if loss or buffers are not finite.
    """
    flags = [~torch.isfinite(norms.max())]
    loss_or_buffers = [flag.to(norms.device) for flag in beyond_scaling]
    flags.append(torch.stack(loss_or_buffers).any() if loss_or_buffers else torch.zeros_like(flags[0]))
    gradients, beyond = replica.all_ranks.sum(torch.stack(flags).float()).tolist()
    if not gradients and not beyond:
        return Status.applied
    return Status.retry if replica.loss_scale.may_retry and not beyond else Status.skipped


def _clip(grads: list[Tensor], norms: Tensor, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm; return the norm before that.

    Norms of whole variables are combined in canonical order: norms of parts would depend on how they are cut. One norm
    of the vector that holds the gradients would round otherwise (docs/decisions/0050).
    """
    norm: Tensor = torch.linalg.vector_norm(norms)
    _scale(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients, of one device or of several, by a () tensor."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def _norms(replica: Replica, grads: Sequence[Tensor | None], present: list[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient, on the device of the first; collective if ranks hold parts of them."""
    if replica.join_norms is not None and replica.lanes is not None and order != _LARGEST:
        # a sum of squares depends on the parts; one gradient is whole at a time
        named = [(name, grad) for name, grad in zip(replica.params, grads, strict=True) if grad is not None]
        return torch.cat([torch.stack(torch._foreach_norm([replica.whole(*pair)], order)) for pair in named])  # noqa: SLF001
    filled = [grad if grad.numel() else grad.new_zeros(1) for grad in present]  # an empty tensor has no largest element
    norms = torch._foreach_norm(filled, order)  # noqa: SLF001 - what torch's own clipping calls
    if len({norm.device for norm in norms}) > 1:
        norms = tuple(norm.to(norms[0].device) for norm in norms)
    local_norms = torch.stack(norms)
    if replica.join_norms is None:
        return local_norms
    indices = [index for index, grad in enumerate(grads) if grad is not None and (not grad.is_sparse or grad._nnz())]  # noqa: SLF001
    return replica.join_norms(local_norms, indices, order)
