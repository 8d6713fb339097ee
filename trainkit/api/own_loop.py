"""A loop of the user's own, with the strategy, the data, the numbers and the run folder of a config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from trainkit.api.calls import Objects, TrainingResult, registered
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.check.rules import unused_keys_with_classes
from trainkit.config.composition import Composition
from trainkit.config.targets.allowed import TARGET, allow_packages
from trainkit.config.targets.build import build
from trainkit.config.yaml_files import with_config_dirs
from trainkit.errors import ConfigError, Problem, StopKind, TrainingError, refuse
from trainkit.objectives.base import Objective
from trainkit.run import runner
from trainkit.run.begin import ResumePoint, RunRequest
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.loop_loss import LoopLoss, LossFunction
from trainkit.run.session.own_loop import OwnLoop
from trainkit.run.signals import EXIT_CODES
from trainkit.strategies.base import LoopCall, PlanContext, Strategy

_OPEN: Final[list[Session]] = []
"""The session of this process that is open."""


class Session:
    """One training of a config, whose loop is the user's own; a context manager.

    The block's end ends the run as the trainer's own loop does: evaluation, last checkpoint, result.json. With an
    error, the run has failed with it, and the last checkpoint is kept.
    """

    def __init__(
        self,
        composition: Composition,
        *,
        objects: Objects,
        launch: LaunchEnvironment | None,
        run_dir: str | Path | None,
        terms: Sequence[str],
    ) -> None:
        self._composition, self._objects, self._launch, self._terms = composition, objects, launch, tuple(terms)
        if run_dir is None and composition.run_dir_given:
            run_dir = composition.run_dir
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._stack = ExitStack()
        self._loop: OwnLoop | None = None
        self._was_open = False
        self._stopped: StopKind | None = None
        self.result: TrainingResult | None = None
        """The content of result.json, once the block has ended without an error; on a rank above 0, its status."""

    def __enter__(self) -> Self:
        """Start the run: place the model, restore the checkpoint of a run that is resumed.

        Raises:
            ConfigError: this process cannot train the config in a loop of its own; nothing was written.
        """
        if self._was_open or _OPEN:
            reason = "this session has ended" if self._was_open else "another session is open in this process"
            raise TrainingError(f"{reason}. Each run has its own session, one after the other.")
        self._was_open = True
        composition = self._composition
        with ExitStack() as stack:
            _OPEN.append(self)
            stack.callback(_OPEN.remove, self)
            stack.enter_context(registered(self._objects))
            stack.enter_context(allow_packages(composition.packages))
            stack.enter_context(with_config_dirs(composition.config_dirs))
            try:
                self._refuse_here()
                request = RunRequest(
                    cfg=composition.cfg, run_dir=self._run_dir, notes=composition.notes, launch=self._launch,
                    is_given=composition.is_given, check=self._check,
                )  # fmt: skip
                task = stack.enter_context(runner.opened(request))
                loop_loss = LoopLoss(self._terms)
                session = stack.enter_context(task.opened(loop_loss))
            except ConfigError as error:
                raise composition.with_origins(error) from error
            assert session is not None
            self._task = task
            stack.enter_context(session.keeping_last_checkpoint())
            self._loop = OwnLoop(session, loop_loss, strategy=self._strategy)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: regularly, or with the error of the block."""
        loop, self._loop = self._opened, None
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._task.end_with(loop.finish())
        self._stopped = loop.task.run.stop_kind
        result = {**(self._task.result or {}), "folder": str(loop.task.run.folder)}
        self.result = TrainingResult(result, objects=self._objects, packages=self._composition.packages)

    def batches(self) -> Iterator[list[Any]]:
        """Yield, for each step, the batches of the shards that this rank computes, on its device.

        The loop ends after the last step, and when the run is asked to stop. Each iteration is one step; after an
        overflow in `update`, the next iteration repeats the step. In a short last batch of an epoch, a rank may have no
        shard; it must still call the step, which is collective.
        """
        return self._opened.batches()

    def step(self, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Make one step: forward, backward and update, over all shards and replicas; collective.

        Args:
            loss_fn: `loss_fn(model, batch)` for the batch of each shard. It returns the mean over the samples, () with
                its graph; a mapping of names to such tensors, which are added up; or a `Loss`, a sum with its weight.
                It may run more than once a shard. None: the loss of the objective.

        Returns:
            The mean loss of this rank, () on its device; None if it had no shard. The call does not wait for the
            device.

        Raises:
            ConfigError: the strategy refuses a loss of the loop.
            TrainingError: `loss_fn` returns something else, or no step is left.
        """
        return self._opened.step(loss_fn)

    def forward_backward(self, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Compute the gradients of a step, over all shards and replicas, as `step` does; `update` comes next.

        Raises:
            ConfigError: the strategy cannot stop between gradients and update, or a run has several optimizers.
        """
        return self._opened.forward_backward(loss_fn)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return copies of the mean gradients of the step, by parameter; for sharded parameters, those of this rank."""
        return self._opened.gradients()

    def update(self) -> bool:
        """Clip, and update the parameters by the gradients; collective.

        Returns:
            False if gradients overflowed (fp16): only the loss scale changed, and the step is repeated.
        """
        return self._opened.update()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the validation splits with the objective; a new best model is saved. Collective.

        Returns:
            The metrics, `val/loss` ...; the previous ones if there was no step since then.
        """
        return self._opened.evaluate()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one; collective."""
        self._opened.save()

    def log(self, figures: Mapping[str, float | Tensor] | None = None, /, **more: float | Tensor) -> None:
        """Add figures to the next row of metrics, for metrics.jsonl and every callback that takes rows.

        The newest figure of each name counts, and of several ranks that of rank 0. The call does not wait for the
        device.
        """
        self._opened.task.logged.add({**(figures or {}), **more})

    @property
    def model(self) -> nn.Module:
        """The model on its devices, as the strategy placed it."""
        return self._opened.task.run.model

    @property
    def objective(self) -> Objective:
        """The configured objective; `objective.loss` is its loss function."""
        return self._opened.task.parts.objective

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._opened.task.run.device

    @property
    def rank(self) -> int:
        """The number of this process; rank 0 writes files."""
        return self._opened.task.executor.local.all_ranks.rank

    @property
    def steps(self) -> int:
        """Steps completed, those before a resume included."""
        return self._opened.task.run.state.step

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._opened.task.run.folder

    @property
    def exit_code(self) -> int:
        """The exit code for a script: 0, or 129, 130, 143 for a run that was asked to stop."""
        return 1 if self.result is None else EXIT_CODES[self._stopped or "finished"]

    @property
    def _opened(self) -> OwnLoop:
        if self._loop is None:
            unopened = "is not open yet: use it in `with trainkit.session(...) as session:`"
            when = "has ended" if self._was_open else unopened
            raise TrainingError(f"the session {when}.")
        return self._loop

    @property
    def _strategy(self) -> str:
        """The name of the strategy: the choice, or its class where there is none."""
        choice = self._composition.choices.get("strategy")
        return str(choice or str(self._composition.cfg.strategy[TARGET]).rpartition(".")[2])

    def _refuse_here(self) -> None:
        """Refuse problems that need no plan, before any process starts or connects."""
        composition, launch = self._composition, self._launch
        refuse(unused_keys_with_classes(composition, None if launch is None else launch.kind))
        if launch is not None and launch.has_evaluator:
            rule = "does not run the loop of the script. Leave it out: the session evaluates."
            raise ConfigError([Problem(key="cluster.evaluator", rule=rule)])
        strategy: Strategy = build(composition.cfg.strategy, "strategy")
        if reason := strategy.facts_in(PlanContext(launch=launch)).refused_calls.get(LoopCall.session):
            raise ConfigError(
                [Problem(key="strategy", value=self._strategy, rule=f"refuses {LoopCall.session.value}: {reason}")]
            )

    def _check(self, start: ResumePoint, plan: RunPlan) -> None:
        """Refuse a plan with tasks other than this process, or with tasks that run no loop."""
        del start
        count, launch = len(plan.tasks), self._launch
        if plan.backend is not None:
            rule = "starts the processes itself, and a loop runs in each. Use torchrun, SLURM or MPI."
            raise ConfigError([Problem(key="cluster", value=plan.backend.name.lower(), rule=rule)])
        if plan.cfg.eval.beside:
            rule = "starts a process that does not run the loop of the script. Use false: the session evaluates."
            raise ConfigError([Problem(key="eval.beside", value=True, rule=rule)])
        if plan.auxiliary_ranks:
            role = str(plan.tasks[plan.auxiliary_ranks[0]])
            raise ConfigError([Problem(key="cluster", rule=f"has the task {role}, which runs no loop. Leave it out.")])
        if launch is None and count > 1:
            rule = f"trains in {count} processes, and the loop runs in each of them. Start:\n    {_command(count)}\n "
            raise ConfigError([Problem(key="strategy", rule=rule)])
        if launch is not None and count > launch.num_ranks:
            rule = f"takes {count // launch.num_ranks} devices in each process. Start one process a device (torchrun)."
            raise ConfigError([Problem(key="strategy", rule=rule)])


def _command(count: int) -> str:
    """Return the command that starts this script once a process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = sys.argv[0]
    start = ["-m", spec.name.removesuffix(".__main__")] if spec else [script if script.endswith(".py") else "SCRIPT.py"]
    rest = sys.argv[1:] if spec or script.endswith(".py") else []
    return shlex.join(["torchrun", "--nproc-per-node", str(count), *start, *rest])
