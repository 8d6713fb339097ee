"""The passes of a run that its plan traces on tensors without data: a shard of a step, and a batch of an evaluation.

Fake tensors have shapes, dtypes and devices, and no data: the pass needs neither the memory nor the time of a real one.
The kernels are those of the CPU, whose autograd formulas save the same tensors as those of other devices.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.checkpoint import checkpoint

from trainkit.data.splits import size_of, test_splits, validation_splits
from trainkit.numerics.copies import computed_tensors
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision, buffer_dtype, param_dtype
from trainkit.objectives.base import Access, Loss, Model, Objective
from trainkit.run.planning.build import assigned_parameters, model_transforms_of
from trainkit.run.planning.convolutions import workspace_of
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import PlannedShard, RankPass, ReplicaPart
from trainkit.strategies.model_transforms import recomputed_modules
from trainkit.strategies.model_transforms.recomputing import selective_contexts
from trainkit.trained.build import frozen_models

Moment = Literal["forward", "backward", "exchange", "optimizer step", "evaluation"]
"""The part of a step, or an evaluation, at which a device holds the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak bytes of a timeline, in addition to the permanent ones."""

    num_bytes: int
    """Number of bytes."""
    moment: Moment
    """The part of the step with the peak."""
    activations: int
    """The bytes of `num_bytes` that do not belong to gradients of parameters."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The tensors of a pass, in the order in which they are allocated and freed.

    Example:
        >>> line = Timeline(events=[(0, 0, 8), (1, 0, 4), (0, 0, -8)], backward_at=1, gradients=frozenset({1}))
        >>> line.peak()
        Peak(num_bytes=12, moment='backward', activations=8)
    """

    events: Sequence[tuple[int, int, int]]
    """(number of the storage, place, bytes; negative when it is freed)."""
    backward_at: int
    """The first event of the backward pass."""
    gradients: frozenset[int]
    """The storages that become the gradients of parameters."""
    received: int = 0
    """Bytes of the receive buffers for tensors of other ranks."""
    once: int = 0
    """Bytes before the backward pass that are shared by all shards in flight."""

    def peak(self, *, gradient_share: float = 1.0, place: int | None = None) -> Peak:
        """Return the moment with the most bytes.

        Args:
            gradient_share: the share of each gradient that the device keeps.
            place: count only the tensors of one place; None: of all.
        """
        held, kept, best = 0, 0.0, Peak(num_bytes=0, moment="forward", activations=0)
        for number, (storage, where, size) in enumerate(self.events):
            if place not in (None, where):
                continue
            if storage in self.gradients:
                kept += size * gradient_share
            else:
                held += size
            if held + kept > best.num_bytes:
                moment: Moment = "forward" if number < self.backward_at else "backward"
                best = Peak(num_bytes=int(held + kept), moment=moment, activations=held)
        return best

    def gradient_bytes(self, place: int | None = None) -> int:
        """Return the bytes of all gradients, of one place or of all."""
        return sum(size for storage, where, size in self.events if storage in self.gradients and place in (None, where))

    def stored(self, place: int | None = None) -> int:
        """Return the bytes saved for the backward pass, of one place or of all."""
        return sum(size for _, where, size in self.events[: self.backward_at] if place in (None, where))


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when the storage of each tensor appears and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int, int]] = []
        self.place = 0
        """The place to which new allocations belong."""
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record the storages that it returns."""
        found = func(*args, **(kwargs or {}))
        for leaf in tree_iter(found):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        size = workspace_of(func, args, found)
        if size:
            self._note_workspace(size)
        return found

    def _note_workspace(self, size: int) -> None:
        """Record memory that an operation takes while it runs."""
        self.events += [(self._count, self.place, size), (self._count, self.place, -size)]
        self._count += 1

    def note(self, tensor: Tensor) -> None:
        """Record the storage of a tensor, unless it is known."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        number, size, place = self._count, storage.nbytes(), self.place
        self._count += 1

        def freed(_: object) -> None:
            del self._known[key]
            self.events.append((number, place, -size))

        self._known[key] = number, weakref.ref(storage, freed)
        self.events.append((number, place, size))

    def ignore(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Do not record these tensors; return their storages, which must stay alive meanwhile."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._known.update({id(storage): (-1, weakref.ref(storage)) for storage in storages})
        return storages

    def forget(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Remove tensors that were recorded; return their storages, which must stay alive meanwhile."""
        numbers = {self.number_of(tensor) for tensor in tensors}
        self.events[:] = [event for event in self.events if event[0] not in numbers]
        return self.ignore(tensors)

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the storage of a tensor that is alive."""
        return self._known[id(tensor.untyped_storage())][0]


@dataclass(kw_only=True)
class TracedPass:
    """One forward and backward pass of a model on a batch.

    Args:
        model: the model, with or without data; unchanged.
        batch: the batch, with or without data; the first dim of each tensor is the sample.
        loss: runs a model on a batch.
        precision: the number formats.
        recomputed: names of the modules that are recomputed in backward.
        selective: whether recomputed modules keep the results of their expensive operations.
        places: name of a module -> the number of the place of the module and its outputs.
        updated: names of the parameters that get gradients; None: all that are trained.
        accumulates: whether a backward pass of another shard has come before, so that gradients exist.
        rank: the behaviour of a rank that differs from one device with a whole replica; used once.
        beside: context manager around the pass, for example a counter of its operations.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Model, Any], Loss]
    precision: Precision
    recomputed: Sequence[str] = ()
    selective: bool = False
    places: Mapping[str, int] = field(default_factory=dict)
    updated: frozenset[str] | None = None
    accumulates: bool = False
    rank: RankPass = field(default_factory=RankPass)
    beside: AbstractContextManager[object] = field(default_factory=nullcontext)

    def run(self) -> Timeline:
        """Run the pass and return its timeline.

        Raises:
            Exception: the model or the objective reads the data of a tensor, or fails for another reason.
        """
        return self._traced(self._pass)

    def run_evaluation(self, *, gradients: bool = False) -> Timeline:
        """Run the forward pass of an evaluation alone, and return its timeline.

        Args:
            gradients: whether the objective needs gradients in an evaluation, too.

        Raises:
            Exception: as in `run`.
        """
        return self._traced(partial(self._evaluation, gradients=gradients))

    def _traced(self, passing: Callable[[nn.Module, Any, LiveStorages], Timeline]) -> Timeline:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with fakes, Untouched(seed=0):
            model = self._without_data()
            self.rank.prepare(model)
            live = LiveStorages()
            kept = live.ignore([*model.parameters(), *model.buffers()])
            batch = tree_map(_fake, self.batch)
            with live:
                if self.accumulates:
                    kept += live.forget(self.rank.keep_gradients(model))
                for leaf in tree_iter(batch):
                    if isinstance(leaf, Tensor):
                        live.note(leaf)
                with self.beside:
                    timeline = passing(model, batch, live)
            del kept
        return timeline

    def _pass(self, model: nn.Module, batch: Any, live: LiveStorages) -> Timeline:
        num_bytes = sum(size for _, _, size in live.events)
        with ExitStack() as stack:
            for name, place in self.places.items():
                _follow(model.get_submodule(name), place, live, stack)
            with torch.enable_grad(), self.precision.autocast(["cpu"]):
                loss = self.rank.loss(model, batch, self.loss)
            total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra
            backward_at = len(live.events)
            torch.autograd.backward(total)
        grads = self.rank.gradients(model)
        return Timeline(
            events=tuple(live.events),
            backward_at=backward_at,
            gradients=frozenset() if self.accumulates else frozenset(map(live.number_of, grads)),
            received=self.rank.received_bytes,
            once=num_bytes + self.rank.once_bytes,
        )

    def _evaluation(self, model: nn.Module, batch: Any, live: LiveStorages, *, gradients: bool) -> Timeline:
        model.eval()
        with ExitStack() as stack:
            for name, place in self.places.items():
                _follow(model.get_submodule(name), place, live, stack)
            with torch.set_grad_enabled(gradients), self.precision.autocast(["cpu"]):
                loss = self.rank.loss(model, batch, self.loss)
            events = tuple(live.events)
            del loss
        return Timeline(events=events, backward_at=len(events), gradients=frozenset())

    def _without_data(self) -> nn.Module:
        """Return a copy of the model whose parameters and buffers have no data; the data is not copied."""
        dtype, fakes = self.precision.model_dtype, dict[int, Any]()
        for prefix, module in self.model.named_modules():
            for name, param in module.named_parameters(prefix, recurse=False):
                trained = param.requires_grad and (self.updated is None or name in self.updated)
                made = _fake(param, param_dtype(module, dtype))
                fakes.setdefault(id(param), nn.Parameter(made, requires_grad=trained))
            for buffer in module.buffers(recurse=False):
                fakes[id(buffer)] = _fake(buffer, buffer_dtype(module, buffer, dtype))
        fakes.update({id(tensor): _fake(tensor, dtype) for tensor in computed_tensors(self.model)})
        model = copy.deepcopy(self.model, fakes)
        self.precision.accept_floats(model)
        for name in self.recomputed:
            module = model.get_submodule(name)
            again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
            module.forward = partial(again, context_fn=selective_contexts) if self.selective else again
        return model


def _fake(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor without data on the CPU, with the shape and strides of another; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    chosen = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if type(value) in {Tensor, nn.Parameter} and value.layout is torch.strided and value.is_contiguous():
        # This call is cached by the mode, unlike empty_like of a tensor of another device, which took two fifths of a
        # ResNet-50's trace.
        return torch.empty_strided(value.shape, value.stride(), dtype=chosen, device="cpu")
    return torch.empty_like(value, device="cpu", dtype=chosen).detach()


def _follow(module: nn.Module, place: int, live: LiveStorages, stack: ExitStack) -> None:
    """Notify `live` when a module computes, forward or backward."""

    def here(*_: object) -> None:
        live.place = place

    def left(_module: nn.Module, _args: object, outputs: object) -> None:
        for leaf in tree_iter(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(here)  # type: ignore[no-untyped-call]

    for handle in (module.register_forward_pre_hook(here), module.register_forward_hook(left)):
        stack.callback(handle.remove)


class NoSampleError(Exception):
    """No sample of the data is known."""


def example_batch(plan: RunPlan, size: int | None = None) -> Any:
    """Return a batch, made of one repeated sample.

    Args:
        plan: the run.
        size: the number of samples; None: that of the largest shard.

    Raises:
        NoSampleError: no sample of the training data is known.
    """
    sample = plan.components.sample
    if sample is None:
        raise NoSampleError("no sample of the data is known")
    size = plan.batch.shard_size(0, 0) if size is None else size
    with Untouched(seed=0):
        return plan.components.hooks.collate_function([sample] * size, list(range(size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The timeline of forward and backward of a shard."""

    timeline: Timeline
    share: float = 1.0
    """The share of the parameters that get gradients."""
    place: int | None = None
    """The place of a device in the timeline; None: one device has all of it."""
    of_rank: bool = False
    """Whether it has exactly the tensors of one rank: gathered parameters, and shards of gradients."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a step."""

    plan: RunPlan
    model: nn.Module
    parts: Sequence[ReplicaPart]
    shards: int
    """The shards that the replica computes."""
    beside: AbstractContextManager[object]
    """Context manager around forward and backward."""

    def lines(self) -> list[list[Line]]:
        """Return the lines of each part: one for each phase of the objective."""
        plan, batch = self.plan, example_batch(self.plan)
        objective = own_copy(plan.components.objective)
        traced = self._traced(batch, objective.loss)
        if not objective.phases:
            return self._of_parts([(1.0, traced)])
        sizes = {name: param.numel() for name, param in self.model.named_parameters() if param.requires_grad}
        phases = []
        for phase, names in assigned_parameters(self.model, plan.optimizers).items():
            share = sum(sizes[name] for name in names) / sum(sizes.values())
            loss = partial(objective.phase_loss, phase)
            phases.append((share, replace(traced, loss=loss, updated=frozenset(names))))
        return self._of_parts(phases)

    def _traced(self, batch: Any, loss: Callable[[Model, Any], Loss]) -> TracedPass:
        """Return the traced pass of a whole replica."""
        model, precision = self.model, self.plan.components.precision
        return TracedPass(
            model=model,
            batch=batch,
            loss=loss,
            precision=precision,
            recomputed=recomputed_names(self.plan, model),
            selective=self.plan.cfg.activation_checkpointing == "selective",
            places=_places(self.parts),
            accumulates=self.shards > 1 and precision.model_dtype is precision.master_dtype and not self._has_vector,
            beside=self.beside,
        )

    @property
    def _has_vector(self) -> bool:
        """Whether gradients outlive a step: then the backward pass of the first shard has the peak."""
        return any(part.memory.bucket is not None for part in self.parts)

    def _of_parts(self, phases: Sequence[tuple[float, TracedPass]]) -> list[list[Line]]:
        found: list[list[Line]] = [[] for _ in self.parts]
        strategy = self.plan.components.strategy
        for share, whole in phases:
            shard = PlannedShard(batch=whole.batch, count=self.shards)
            passes = strategy.rank_passes(self.model, self.plan.context, shard)
            for lines, one in zip(found, passes, strict=False):
                lines.append(Line(timeline=replace(whole, rank=one, places={}).run(), share=share, of_rank=True))
            if not passes:
                timeline, several = whole.run(), len(self.parts) > 1
                for place, lines in enumerate(found):
                    lines.append(Line(timeline=timeline, share=share, place=place if several else None))
        return found


@dataclass(frozen=True, kw_only=True)
class EvaluatedBatch:
    """The largest batch of the evaluations of a run."""

    plan: RunPlan
    model: nn.Module
    parts: Sequence[ReplicaPart]

    def lines(self) -> list[Line]:
        """Return the line of each part; none if the run evaluates nothing, or in a pipeline, whose ranks send tensors
        to each other.
        """
        plan, size = self.plan, evaluated_samples(self.plan)
        if not size or any(part.received for part in self.parts):
            return []
        objective = own_copy(plan.components.objective)
        whole = TracedPass(
            model=self.model,
            batch=example_batch(plan, size),
            loss=objective.loss,
            precision=plan.components.precision,
            places=_places(self.parts),
        )
        gradients = Access.derivatives in objective.needs
        shard = PlannedShard(batch=whole.batch, count=1)
        passes = plan.components.strategy.rank_passes(self.model, plan.context, shard)
        found = [replace(whole, rank=one, places={}).run_evaluation(gradients=gradients) for one in passes]
        if found:
            return [Line(timeline=timeline, of_rank=True) for timeline in found]
        timeline, several = whole.run_evaluation(gradients=gradients), len(self.parts) > 1
        return [Line(timeline=timeline, place=place if several else None) for place in range(len(self.parts))]


def evaluated_samples(plan: RunPlan) -> int:
    """Return the samples of the largest batch of an evaluation; 0 if the run evaluates nothing."""
    datasets = plan.components.datasets
    names = [] if plan.is_measurement else [*validation_splits(datasets), *test_splits(datasets)]
    return max((min(size_of(datasets[name]), plan.eval_batch_size) for name in names), default=0)


def _places(parts: Sequence[ReplicaPart]) -> dict[str, int]:
    """Return the place of each module whose device is known: name -> number of the part."""
    return {name: place for place, part in enumerate(parts) for name in part.modules}


def batch_bytes(plan: RunPlan) -> int:
    """Return the bytes of the batch of the largest shard."""
    leaves = tree_iter(example_batch(plan))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def own_copy(objective: Objective) -> Objective:
    """Return a copy whose state a pass without data may change; frozen models are shared."""
    return copy.deepcopy(objective, {id(model): model for _, model in frozen_models(objective)})


def recomputed_names(plan: RunPlan, model: nn.Module) -> list[str]:
    """Return the names of the modules that backward recomputes."""
    chosen = {id(module) for module in recomputed_modules(model, model_transforms_of(plan.cfg))}
    return [name for name, module in model.named_modules() if id(module) in chosen]
