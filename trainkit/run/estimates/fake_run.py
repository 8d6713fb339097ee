"""Observe the steps of a rank without data: its own executor on fake tensors, in a process group without other ranks.

The strategy sets up the executor of a run, which takes its own steps, so that nothing here knows the order in which a
strategy allocates or exchanges. The private parts of torch that this needs are used in this module alone; a collective
that it does not know is refused.

The tensors are fake ones of the CPU, because backward of fake tensors of a GPU needs a GPU: the terms of a device are
added by the caller. Small tensors that are made from nothing have data: the ranks agree on some values.
"""

# ruff: noqa: SLF001 - here, and nowhere else

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from trainkit.cluster.tasks import Identity, Task
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank
from trainkit.numerics.generators import Untouched
from trainkit.objectives.base import Access
from trainkit.run.estimates.passes import evaluated_samples, example_batch, fake_of, own_copy, taking_data, without_data
from trainkit.run.planning.build import model_transforms_of
from trainkit.run.planning.convolutions import workspace_of
from trainkit.run.planning.memory import optimizers_of
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import (
    CollectiveCall,
    Executor,
    GradientListener,
    Kind,
    SetupRequest,
    StepContext,
    UpdateParams,
)
from trainkit.strategies.model_transforms import apply_transforms
from trainkit.strategies.one_device import OneDevice

_SMALL: Final = 4096
"""Elements up to which a tensor that is made from nothing has data."""
_KINDS: Final[Mapping[str, Kind]] = {
    "send": "send",
    "alltoall": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "gather": "all-gather",
    "reduce": "all-reduce",
}
"""Part of the name of a collective -> its kind; the first one counts."""
_COPIED: Final = tuple({*_KINDS.values()} - {"send", *left_out} for left_out in ((), ("all-reduce",)))
"""The kinds of collectives of which gloo makes a copy: all, and those beside the sum of another reducer."""
_FREED_S: Final = 0.01
"""Seconds in which a thread of gloo frees what it has exchanged, in steps with data."""
_SENDS_NOTHING: Final = ("wait_tensor", "barrier", "wrap_tensor_autograd", "recv")
_GROUP_NUMBERS: Final = count(1_000_000, 1_000_000)
"""Numbers of the first group of each fake run: torch's caches must not find groups of an earlier one by name."""


@dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """The memory and the collectives of a rank in a step after the first one, and in an evaluation."""

    peaks: Mapping[str, int]
    """Phase -> the most bytes of tensors that are alive in it."""
    start: int
    """Bytes that are alive between steps, with the batches of one."""
    first_forward: int
    """Peak bytes of the first forward pass, in which no gradient is alive unless it outlives the step."""
    most: int
    """Peak bytes of forward and backward passes."""
    collectives: Sequence[CollectiveCall]
    """The collectives of the step."""
    num_batches: int
    """Number of batches that are alive in a step."""
    evaluation: int | None = None
    """Peak bytes of an evaluation; None if the run has none, or it cannot be observed."""
    evaluation_error: Exception | None = None
    """Why an evaluation cannot be observed."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages by phase, and records collectives, of fake tensors or of others.

    Args:
        fakes: the mode of the fake tensors; None: all tensors have data.
        copied: the kinds of collectives that copy what they exchange, as those of gloo do.
        shards: number of shards that the rank computes in a step.
        only_inside: whether a storage counts only while `inside`, and outside of passes only if it is made from counted
            ones.
    """

    def __init__(
        self, fakes: FakeTensorMode | None, *, copied: Collection[Kind], shards: int, only_inside: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes, self._copied, self._shards = fakes, copied, shards
        self._only_inside, self.inside = only_inside, True
        self.live, self.phase = 0, ""
        self.peaks: Counter[str] = Counter()
        self.first_forward = 0
        self.collectives: list[CollectiveCall] = []
        self._forwards = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._normed: set[int] = set()
        self._stack = ExitStack()

    def begin(self) -> None:
        """Reset the records; live storages stay counted."""
        self.peaks.clear()
        self.collectives.clear()
        self._forwards = 0

    def enter(self, phase: str, step: int = 0) -> None:
        """Begin a phase of a step."""
        del step
        if phase != "forward" and self._forwards == 1 and self.phase == "forward":
            self.first_forward = self.peaks["forward"]
        self._forwards += phase == "forward"
        self.phase = phase
        self._note(self.live)

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees and fills storages by this
            result = resize(storage, size)
            if weakref.ref(storage) in self._sizes:
                self.see(storage)
            return result

        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it makes; a DTensor comes back with its local tensors."""
        if asks_for_device(func) and isinstance(args[0], FakeTensor):  # two of three calls
            inside = args[0].fake_mode.in_kernel_invocation
            return torch.device("meta") if inside else args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if not self.is_own:
            return func(*args, **kwargs)  # DTensor infers a shape
        result = func(*args, **kwargs) if self._fakes is None else self._without_data(self._fakes, func, args, kwargs)
        if self._counts(args, kwargs):
            for leaf in tree_iter(result):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                    self.see(leaf.untyped_storage())
            self._note(self.live + workspace_of(func, args, result))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record(func, args, result)
        return result

    @property
    def listener(self) -> GradientListener | None:
        """The receiver of the gradients of updates; None: they are not observed."""
        return None

    @property
    def is_own(self) -> bool:
        """Whether an operation is one of the step; else DTensor infers a shape."""
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return active is None or active is self._fakes

    def peer(self, args: Sequence[Any]) -> int:
        """Return the rank to which, or from which, a call sends."""
        return int(group_ranks(args)[args[2]])

    def _counts(self, args: Any, kwargs: Any) -> bool:
        """Return whether the storages that an operation makes count."""
        if not self._only_inside or self.phase == "begin":
            return True
        if self.phase in ("forward", "backward", "evaluation"):
            return self.inside
        leaves = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_sparse)
        return any(weakref.ref(leaf.untyped_storage()) in self._sizes for leaf in leaves)

    def follow(self, model: nn.Module, modules: Sequence[str]) -> None:
        """Be `inside` during these modules of a model only, and count their parameters and buffers."""
        followed = {inner for name in modules for inner in model.get_submodule(name).modules()}

        def enter(module: nn.Module, _args: object) -> None:
            self.inside = module in followed

        def leave(module: nn.Module, _args: object, outputs: object) -> None:
            for leaf in tree_iter(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: enter(module, ()))  # type: ignore[no-untyped-call]

        for module in model.modules():
            if module in followed or not any(inner in followed for inner in module.modules()):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)
        self.see_tensors(followed)

    def see_tensors(self, modules: Iterable[nn.Module]) -> None:
        """Count the own parameters and buffers of modules."""
        for module in modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.see(tensor.untyped_storage())

    def _without_data(self, fakes: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        if not tensors and func.namespace == "aten":
            with fakes:
                result = func(*args, **kwargs)
            outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
            if outputs and all(leaf.numel() > _SMALL for leaf in outputs):
                return result
        elif any(isinstance(leaf, FakeTensor) for leaf in tensors):
            if name.startswith(("aten::_fused_", "aten::_foreach_")) and name.endswith("_"):
                return None  # changes its arguments alone; torch would run some of them with data
            if func.is_view and func.namespace == "aten" and _is_plain(tensors):
                # as the mode does after its cache, which finds few views: half of the time of a step without data
                with in_kernel_invocation_manager(fakes):
                    view = func(*args, **kwargs)
                return tree_map(lambda leaf: FakeTensor(fakes, leaf, tensors[0].device), view)
            if "batch_norm" in name:
                self._normed.update(leaf.untyped_storage()._cdata for leaf in tensors)
            if name == "aten::equal":  # asked of buffers, whose version batch normalisation does not count
                return tensors[0].untyped_storage()._cdata not in self._normed
            if name == "aten::_local_scalar_dense" and self.phase == "update":
                return tensors[0].dtype is torch.bool  # whether gradients are finite; sums of overflows
        return func(*args, **kwargs)

    def _record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Record a collective.

        Raises:
            NotImplementedError: it is not known.
        """
        name = func._schema.name.split("::")[1].strip("_")
        if self._fakes is None:
            time.sleep(_FREED_S)
        if name == "recv" and self._fakes is not None and not isinstance(args[0][0], FakeTensor):
            args[0][0].fill_(1)  # the vote of another stage
        if name in _SENDS_NOTHING:
            return
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is None and name != "broadcast":
            raise NotImplementedError(f"the collective {name} is not known")
        ranks = group_ranks(args)
        if kind == "send":
            ranks = [dist.get_rank(), ranks[args[2]]]
        leaves = [[leaf for leaf in tree_iter(arg) if isinstance(leaf, Tensor)] for arg in (*args, result)]
        size = max(sum(leaf.nbytes for leaf in tensors) for tensors in leaves)
        if kind is None:
            return
        shard = (self._forwards - 1) % self._shards if self.phase in ("forward", "backward") else None
        self.collectives.append(
            CollectiveCall(
                kind=kind, ranks=tuple(ranks), num_bytes=size, shard=shard, is_in_update=self.phase == "update"
            )
        )
        if kind in self._copied:
            self._note(self.live + size)

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, or its new size."""
        key = weakref.ref(storage, self._forget)
        self.live += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self._note(self.live)

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _note(self, size: int) -> None:
        phase = self.phase
        if phase == "forward" and in_backward():  # a schedule of stages mixes the two
            phase = "backward"
        self.peaks[phase] = max(self.peaks[phase], size)


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether the argument of a view is one dense tensor without data, of which torch knows no value."""
    (tensor, *rest) = tensors
    return isinstance(tensor, FakeTensor) and not rest and tensor.constant is None and tensor.layout is torch.strided


def _group_of(arg: object) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a collective is or names."""
    if isinstance(arg, torch.ScriptObject) and str(arg._type()).endswith(".ProcessGroup"):
        return dist.ProcessGroup.unbox(arg)
    if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
        return torch._C._distributed_c10d._resolve_process_group(GroupName(arg))
    return None


def group_ranks(args: Sequence[Any]) -> list[int]:
    """Return the ranks that take part in a collective."""
    return dist.get_process_group_ranks(next(group for group in map(_group_of, args) if group is not None))


def reduction_of(args: Sequence[Any]) -> tuple[list[int], str]:
    """Return the ranks of a reduction, and its operation: sum, avg, or another one by number."""
    ops: list[Any] = [
        arg for arg in args if isinstance(arg, torch.ScriptObject) and str(arg._type()).endswith(".ReduceOp")
    ]
    name = next((arg for arg in args if arg in ("sum", "avg", "max", "min", "product")), None) if not ops else None
    number = int(ops[0].op()) if ops else -1
    return group_ranks(args), name or {0: "sum", 1: "avg"}.get(number, f"operation {number}")


def in_backward() -> bool:
    """Return whether autograd computes a backward pass."""
    return torch._C._current_graph_task_id() != -1


def asks_for_device(func: Any) -> bool:
    """Return whether an operation only asks for the device of a tensor."""
    return func is torch.ops.prim.device.default


# a strategy asks for gloo by name
dist.Backend.register_backend("fake_gloo", _create_fake_pg, extended_api=True, devices=["cpu"])


@contextmanager
def _alone(rank: int, num_ranks: int, backend: str) -> Iterator[None]:
    """Act as one rank of a process group without the others; the groups of this process are hidden meanwhile."""
    world = SimpleNamespace(
        default_pg=None, group_count=next(_GROUP_NUMBERS), comms=[], pg_config_info=[],
        **{name: {} for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag",
                                 "pg_coalesce_state")},
    )  # fmt: skip
    with (
        mock.patch.object(distributed_c10d, "_world", world),
        mock.patch.object(dist.ProcessGroup, "set_timeout", _ignore),
        # else the groups of a run, within which this may happen, lose the names by which DTensor finds them
        mock.patch.object(distributed_c10d, "_unregister_all_process_groups", _ignore),
        mock.patch.object(dist, "isend", _keep_sent),
        mock.patch.object(distributed_c10d, "isend", _keep_sent),
        taking_data(),
    ):
        dist.init_process_group(backend, rank=rank, world_size=num_ranks, store=FakeStore())
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call] # it holds meshes, and takes equal ones for the same
        try:
            yield
        finally:
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            names = list(world.pg_names.values())
            dist.destroy_process_group()
            for name in names:
                torch._C._distributed_c10d._unregister_process_group(GroupName(name))


def _ignore(*_: object) -> None:
    """Do nothing."""


_isend: Final = dist.isend


def _keep_sent(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Send a tensor, and keep it alive as long as the work, as other backends do."""
    work = _isend(tensor, *args, **kwargs)
    return work and SimpleNamespace(wait=work.wait, sent=tensor)


def observe(
    plan: RunPlan,
    model: nn.Module,
    *,
    rank: int = 0,
    modules: Sequence[str] = (),
    evaluates: bool = False,
    has_data: bool = False,
    batch_of: Callable[[int], Any] | None = None,
    watching: Callable[..., Watch] = Watch,
) -> ObservedSteps:
    """Take steps of one rank of a run, and observe the last one.

    A step has the first two shards of the rank and its last one: those between are like the second. A rank of several
    stages has more, as many of them are in flight at once. Of a strategy that cannot be observed, one device is
    observed, with the shards of a replica.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged unless `has_data`.
        rank: one of `Strategy.observed_ranks`.
        modules: names of the modules whose tensors count; empty: all.
        evaluates: whether to observe an evaluation, too.
        has_data: take the steps with data, in the process group of this process, to compare.
        batch_of: returns a batch of so many samples, as `example_batch`, for several calls; None: it is made here.
        watching: makes what watches; its `listener` receives the gradients.

    Raises:
        Exception: the model or the objective reads the data of a tensor, or the step cannot run without data.
    """
    strategy, num_ranks, replicas = plan.components.strategy, plan.num_computing, plan.num_replicas
    stages = len(strategy.observed_ranks(plan.context))
    if not stages:
        strategy, num_ranks, replicas = OneDevice(), 1, 1
    observed, numerics = strategy if has_data else strategy.as_observed(), plan.components.numerics
    lanes = numerics.lanes if numerics.reproducible else None
    shards = shards_of_rank(
        plan.batch.num_shards(0),
        rank=rank // (num_ranks // replicas),
        num_ranks=plan.num_replicas if lanes is None else replicas,
        lanes=lanes,
    )
    count = len(shards) if lanes is not None else strategy.observed_shards(len(shards))
    chosen = shards if count == len(shards) else (*shards[: count - 1], shards[-1])
    fakes = None if has_data else FakeTensorMode(allow_non_fake_inputs=True)
    on_cpu = plan.tasks[rank].device == "cpu"
    # all-reduces that another reducer replaces copy nothing
    copies = {variant.estimate_memory(model, plan.context).gradient_copies for variant in (strategy, observed)}
    watch = watching(
        fakes, copied=_COPIED[len(copies) > 1] if on_cpu else (), shards=len(chosen), only_inside=bool(modules)
    )
    with ExitStack() as stack:
        stack.enter_context(Untouched(seed=0))
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # torch's, about its own calls
        if fakes is not None:
            stack.enter_context(_alone(rank, num_ranks, "fake_gloo" if on_cpu else "fake"))
            model = without_data(model, fakes)
        apply_transforms(model, replace(model_transforms_of(plan.cfg), compile_mode="off"))
        # the last step of this epoch has one shard a rank: it makes what outlives a step
        size = plan.batch.shard_size(0, 0)
        batches = BatchPlan(
            num_samples=replicas * (len(chosen) + 1) * size, global_size=replicas * len(chosen) * size, micro_size=size
        )
        steps = [batches.steps_per_epoch - 1, *[batches.steps_per_epoch] * (2 if stages > 1 else 1)]
        if lanes is not None:  # the order of the lanes is that of all shards
            batches, steps = plan.batch, [0, 0]
        training = StepContext(
            plan=batches,
            objective=own_copy(plan.components.objective),
            weighing=plan.components.weighing,
            rule=partial(UpdateParams.at, plan.rate, plan.cfg.clip.max_norm),
            phases=plan.phases,
            on_gradients=watch.listener,
        )
        make_batch = batch_of or cache(partial(example_batch, plan))
        examples = [make_batch(plan.batch.shard_size(0, shard)) for shard in chosen]
        eval_batch = make_batch(size) if evaluates and (size := evaluated_samples(plan)) else None
        stack.enter_context(watch)
        watch.follow(model, modules) if modules else watch.see_tensors(model.modules())
        task = Task(role="worker", index=rank, rank=rank, device="cpu")
        make, optimizers = optimizers_of(plan, model, {} if on_cpu else _at_once(plan))
        executor = observed.setup(
            SetupRequest(
                model=model,
                identity=Identity(task=task, num_ranks=num_ranks, store=None if num_ranks == 1 else ("", 0)),
                precision=plan.components.precision,
                numerics=numerics,
                make_optimizer=make,
                optimizers=optimizers,
                training=training,
                open_data=_no_data,
                on_phase=watch.enter,
            )
        )
        del model
        for step in steps:
            ticket = Ticket(step, executor.assign(step))
            inputs = [_batch(example, fakes) for example in examples[: len(ticket.shards)]]
            watch.begin()
            watch.enter("begin")
            start = watch.live
            executor.step(ticket, inputs)
        result = ObservedSteps(
            peaks=dict(watch.peaks),
            start=start,
            first_forward=watch.first_forward,
            most=max(watch.peaks["forward"], watch.peaks["backward"]),
            collectives=_of_all_shards(watch.collectives, len(shards), len(chosen), is_staged=stages > 1),
            num_batches=len(chosen),
        )
        del inputs
        if eval_batch is None or stages > 1:
            return result
        try:
            watch.begin()
            watch.enter("evaluation")
            _evaluate(executor, plan, _batch(eval_batch, fakes))
        except Exception as error:  # noqa: BLE001 - the user's objective may fail in any way without data
            return replace(result, evaluation_error=error)
        return replace(result, evaluation=watch.peaks["evaluation"])


def _at_once(plan: RunPlan) -> Mapping[str, bool]:
    """Return the settings by which optimizers update several parameters at once, if the config leaves that open."""
    nodes = [optimizer.node for optimizer in plan.optimizers] or [plan.cfg.optimizer]
    is_open = plan.cfg.optimizer.get("foreach") is None and not all(node.get("fused") for node in nodes)
    return {"fused": False, "foreach": True} if is_open else {}


def _of_all_shards(
    calls: Sequence[CollectiveCall], total: int, num_taken: int, *, is_staged: bool
) -> tuple[CollectiveCall, ...]:
    """Return collectives with the number of shards in which they occur, if a step takes only some of them."""
    if total == num_taken:
        return tuple(calls)
    if not is_staged:
        return tuple(replace(call, times=total - 2) if call.shard == 1 else call for call in calls)
    counts = Counter(calls)  # what each shard repeats
    return tuple(replace(call, times=total / num_taken) if counts[call] % num_taken == 0 else call for call in calls)


def _evaluate(executor: Executor, plan: RunPlan, batch: Any) -> None:
    local, objective = executor.local, own_copy(plan.components.objective)
    local.model.eval()
    with torch.set_grad_enabled(Access.derivatives in objective.needs), local.precision.autocast(local.device_types):
        objective.loss(local.model, batch)


def _no_data(device: torch.device) -> Any:
    raise NotImplementedError(f"no data is opened on {device} for a step without data")


def _batch(example: Any, fakes: FakeTensorMode | None) -> Any:
    def copied(leaf: Any) -> Any:
        return leaf if not isinstance(leaf, Tensor) else leaf.clone() if fakes is None else fake_of(leaf, fakes)

    return tree_map(copied, example)
