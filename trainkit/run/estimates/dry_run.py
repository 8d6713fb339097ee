"""Run a shard and an update without data, to give a strategy the facts that it needs before the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainkit.objectives.base import Loss, Model
from trainkit.run.estimates.activations import TracedPass
from trainkit.run.estimates.passes import example_batch, own_copy, recomputed_names
from trainkit.run.planning.memory import stepped_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.traffic import CollectiveCall, ModuleCall, TensorFacts


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
