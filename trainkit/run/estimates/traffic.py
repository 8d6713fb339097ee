"""The bytes that the tasks of a run exchange in a step, by purpose and by link."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from trainkit.files import num_bytes
from trainkit.objectives.base import Loss, Model
from trainkit.run.estimates.activations import TracedPass
from trainkit.run.estimates.passes import example_batch, own_copy, recomputed_names
from trainkit.run.planning.memory import stepped_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.traffic import (
    CollectiveCall,
    ModuleCall,
    StepCut,
    TensorFacts,
    Transfer,
    ranks_a_host,
    times,
    traffic_of,
)

LinkKind = Literal["memory", "within_host", "between_hosts"]
"""Path of a byte: memory shared by the tasks of a host, a link within a host, or one between hosts."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The transfers of a full step."""

    transfers: tuple[Transfer, ...]
    ranks_a_host: int
    """Number of consecutive ranks on one host."""

    def link_of(self, transfer: Transfer, pair: tuple[int, int]) -> LinkKind:
        """Return the link between two ranks."""
        if transfer.by == "memory":
            return "memory"
        sender, receiver = (rank // self.ranks_a_host for rank in pair)
        return "within_host" if sender == receiver else "between_hosts"

    def at(self, step: int) -> Traffic:
        """Return the transfers of one step: some begin later, end, or occur once in several steps."""
        return self._of_one_step(one for one in self.transfers if one.occurs_at(step))

    def around(self, step: int) -> Traffic:
        """Return the transfers of the phase of a step, on average: a transfer every 8 steps counts one eighth.

        Example:
            >>> average = Transfer(what="parameters", how="all-reduce", flows={(0, 1): 80.0}, every=8)
            >>> Traffic(transfers=(average,), ranks_a_host=2).around(0).network_bytes()
            10.0
        """
        return self._of_one_step(
            replace(one, flows=times(one.flows, 1 / one.every), messages=-(-one.messages // one.every))
            for one in self.transfers
            if one.lasts_at(step)
        )

    def _of_one_step(self, transfers: Iterable[Transfer]) -> Traffic:
        found = tuple(replace(one, first_step=0, end_step=None, every=1) for one in transfers)
        return replace(self, transfers=found)

    @property
    def lasting(self) -> Traffic:
        """The transfers of a step on average, in the last phase."""
        return self.around(max((one.first_step for one in self.transfers), default=0))

    def by_link(self) -> dict[LinkKind, float]:
        """Return the bytes of a step on average, in the last phase, over each kind of link, of all ranks together."""
        total: dict[LinkKind, float] = {}
        for one in self.lasting.transfers:
            for pair, size in one.flows.items():
                link = self.link_of(one, pair)
                total[link] = total.get(link, 0.0) + size
        return total

    def network_bytes(self, rank: int | None = None) -> float:
        """Return the bytes that all ranks send over a network in a step, or that one rank sends and receives."""
        pairs = [(pair, size) for one in self.transfers if one.by == "network" for pair, size in one.flows.items()]
        return sum(size for pair, size in pairs if rank is None or rank in pair)

    def mean_bytes(self, first: int, end: int, *, rank: int) -> float:
        """Return the bytes that a rank sends and receives over a network in a step, averaged over the steps from
        `first` to `end`.
        """
        return sum(self.at(step).network_bytes(rank) for step in range(first, end)) / max(end - first, 1)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of `trainkit plan`: label, text."""
        names = {"memory": "shared memory", "within_host": "within a host", "between_hosts": "between hosts"}
        parts = [f"{num_bytes(int(one.num_bytes))} {one.what} by {one.how}{_when(one)}" for one in self.transfers]
        links = [f"{num_bytes(int(size))} {names[link]}" for link, size in self.by_link().items()]
        if parts:
            yield "sent a step", f"{', '.join(links)}: {'; '.join(parts)}"

    def notes(self) -> Iterator[str]:
        """Yield notes about the limits of the figures."""
        yield from dict.fromkeys(one.note for one in self.transfers if one.note is not None)

    def document(self) -> Mapping[str, object]:
        """Return the object `traffic` of `trainkit plan --json`: bytes of a step, of all ranks."""
        return {
            "links": {link: round(size) for link, size in self.by_link().items()},
            "transfers": [
                {
                    "what": one.what,
                    "how": one.how,
                    "bytes": round(one.num_bytes),
                    "messages": one.messages,
                    "overlaps": one.overlaps,
                    "first_step": one.first_step,
                    "end_step": one.end_step,
                    "every": one.every,
                }
                for one in self.transfers
            ],
        }


def _when(one: Transfer) -> str:
    if one.end_step is not None:
        return f" before step {one.end_step:,}"
    every = f" every {one.every:,} steps" if one.every > 1 else ""
    return every + (f" from step {one.first_step:,} on" if one.first_step else "")


def step_traffic(
    plan: RunPlan, model: nn.Module, collectives: Sequence[CollectiveCall] | None = None
) -> Traffic | None:
    """Return the traffic of a full step; None if that is not known before the run.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        collectives: those of the first rank, if its step was observed before; None: it is observed if necessary.
    """
    cut = StepCut(
        num_shards=plan.batch.num_shards(0),
        num_replicas=plan.num_replicas,
        dry_run=PlannedDryRun(plan=plan, model=model, observed=collectives),
    )
    found = traffic_of(plan.components.strategy, model, plan.context, cut)
    if found is None:
        return None
    count = sum(not task.is_evaluator for task in plan.tasks)
    return Traffic(transfers=found, ranks_a_host=ranks_a_host(plan.context, count))


@dataclass(frozen=True, kw_only=True)
class PlannedDryRun:
    """The dry run of a plan (`trainkit.strategies.traffic.DryRun`)."""

    plan: RunPlan
    model: nn.Module
    """The model, with or without data; unchanged."""
    observed: Sequence[CollectiveCall] | None = None
    """The collectives of the first rank, if they are known already."""

    def calls(self, names: Collection[str]) -> Sequence[ModuleCall] | None:
        """Return the calls of modules in forward and backward of the largest shard; None if it cannot run without
        data.
        """
        recorder = _Recorder()
        try:
            with ExitStack() as stack:
                for name in names:
                    recorder.watch(name, self.model.get_submodule(name), stack)
                self._run(recorder)
        except Exception:  # noqa: BLE001 - the user's model and objective may fail in any way without data
            return None
        return recorder.calls

    def _run(self, recorder: _Recorder) -> None:
        """Run forward and backward.

        Raises:
            Exception: no sample is known, or model or objective cannot run without data.
        """
        plan = self.plan
        objective = own_copy(plan.components.objective)

        def loss(model: Model, batch: Any) -> Loss:
            found = objective.loss(model, batch)
            recorder.is_again = True
            return found

        TracedPass(
            model=self.model,
            batch=example_batch(plan),
            loss=loss,
            precision=plan.components.precision,
            recomputed=recomputed_names(plan, self.model),
            selective=plan.cfg.activation_checkpointing == "selective",
            accumulates=True,  # make gradients dense: sparse ones have no storage to trace
        ).run()

    def collectives(self) -> Sequence[CollectiveCall] | None:
        """Return the collectives of the first rank in a step; None if it cannot run without data."""
        if self.observed is not None:
            return self.observed
        from trainkit.run.estimates.fake_run import observe  # noqa: PLC0415 - imports torch's compiler: seconds

        try:
            return observe(self.plan, self.model).collectives
        except Exception:  # noqa: BLE001 - the user's model and objective may fail in any way without data
            return None

    def state_elements(self) -> int | None:
        """Return the elements of the optimizer's state of a whole model; None if the optimizer cannot run without
        data.
        """
        sizes = {name: param.numel() for name, param in self.model.named_parameters()}
        optimizers = stepped_optimizers(self.plan, self.model, sizes, fused=False, foreach=False)
        if optimizers is None:
            return None
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))


@dataclass(kw_only=True)
class _Recorder:
    """Records the calls of watched modules, also those of copies of a model."""

    calls: list[ModuleCall] = field(default_factory=list)
    is_again: bool = False
    """Whether forward has ended, so that a call is a recomputation."""

    def watch(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        """Record the calls of a module until the stack closes."""

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(iter((*args, *kwargs.values())), None)
            self.calls.append(ModuleCall(name=name, given=_facts(given), is_again=self.is_again))

        def end(_module: nn.Module, _args: object, outputs: object) -> None:
            open_calls = (call for call in reversed(self.calls) if call.name == name and call.returned is None)
            call = next(open_calls)
            call.returned, call.has_loss = _facts(outputs), isinstance(outputs, Loss)

        # Use functions: a copy of the module shares them, and so the same recorder.
        stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(end).remove)


def _facts(value: object) -> TensorFacts | None:
    if not isinstance(value, Tensor):
        return None
    return TensorFacts(numel=value.numel(), width=value.element_size(), requires_grad=value.requires_grad)
