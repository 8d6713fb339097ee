"""Write and restore the checkpoints of a run, and the last one of a training that ends with an error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.errors import DataError, LinkError, NonFiniteError, OutOfMemoryError, TrainingError, TrainkitError
from trainkit.names import name_of
from trainkit.objectives.base import Collective
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.evaluation import EvalRunner
from trainkit.strategies import ALL_DEVICES
from trainkit.strategies.base import Executor
from trainkit.strategies.collectives import all_gather_object
from trainkit.strategies.core.replica import bits_hash
from trainkit.strategies.tensor_shards import ShardedState, TensorShard, nonfinite, select
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.checkpoint.tensors import Loaded, sha256_of_pieces, weights_sha256
from trainkit.trainer.events import REMEDY, Callback, RollbackNeeded, Run
from trainkit.trainer.loop import CallbackHooks, TriggerSchedule
from trainkit.trainer.manifest import Retention, damaged
from trainkit.trainer.metrics_accumulator import MetricsAccumulator


class Checkpointer:
    """Writes the checkpoints of a run, at most one per step; every rank has one, and that of rank 0 writes the files.

    If the state is sharded, every rank writes its shards: then `save`, `notify_saved` and `close` are collective.
    """

    def __init__(
        self,
        plan: RunPlan,
        run: Run,
        executor: Executor,
        *,
        callbacks: CallbackHooks,
        fingerprint: str,
        confirm: Callable[[], None],
        enter: Callable[[str], None],
        snapshot: Snapshot | None,
    ) -> None:
        self._plan, self._run, self._executor, self._snapshot = plan, run, executor, snapshot
        self._callbacks, self._fingerprint, self._enter = callbacks, fingerprint, enter
        self._settings, self._config = plan.cfg.checkpoint, plan.cfg.to_dict()
        self._confirm, self._prepared = confirm, False
        is_sharded = plan.components.strategy.facts_in(plan.context).is_sharded
        self._is_sharded = is_sharded and executor.local.all_ranks.num_ranks > 1
        """Whether every rank writes its shards; otherwise rank 0 writes whole checkpoints."""
        self._finite: set[str] = set()
        """The buffers that were finite at the start."""
        if any(True for _ in executor.local.model.buffers()):
            buffers = {name: parts for name, parts in self.collect().items() if name.startswith("buffer/")}
            self._finite = buffers.keys() - set(nonfinite(buffers))
        self._saved_at: int | None = None
        self._saved_when = time.monotonic()

    @cached_property
    def _saver(self) -> Saver:
        """Made by the first save."""
        return Saver(
            self._run.folder / "checkpoints",
            self._executor.local.all_ranks if self._is_sharded else None,
            retention=retention_of(self._plan.cfg),
            confirm=self._confirm,
            background=self._settings.background,
            snapshot=self._snapshot,
        )

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint.every_s` has passed since the last save."""
        every_s = self._settings.every_s
        return every_s is not None and time.monotonic() - self._saved_when >= every_s

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint of the current step."""
        return self._saved_at == self._run.state.step

    @property
    def writes_here(self) -> bool:
        """Whether this rank writes something."""
        return self._is_sharded or self._run.is_owner

    def mark_saved(self) -> None:
        """Mark the step as saved on every rank, independent of the rank that writes it."""
        self._saved_at, self._saved_when = self._run.state.step, time.monotonic()
        self._run.state.left_out.saved(self._run.state.step)

    def save_again(self) -> None:
        """Let the next save write the checkpoint of the current step even if there is one."""
        self._saved_at = None

    def collect(self) -> ShardedState:
        """Return the part of the current state that this rank writes; tensors are not copied and change with the next
        step.
        """
        return self._executor.sharded_state_dict()

    def refuse_nonfinite(self, pieces: ShardedState) -> None:
        """Raise if a trained parameter, or a buffer that was finite, is no longer finite; collective.

        Raises:
            NonFiniteError: on every rank; names the step and a tensor.
        """
        local_names = self._nonfinite_names(pieces)
        everywhere = sorted(
            {name for names in all_gather_object(local_names[:8], self._executor.local.all_ranks) for name in names}
        )
        if everywhere:
            kind, _, name = everywhere[0].partition("/")
            noun = {"param": "parameter", "buffer": "buffer"}[kind]
            raise NonFiniteError(
                f"after step {self._run.state.step} the {noun} {name} is not finite, and no checkpoint of it is "
                f"written. {REMEDY}; numerics.on_nonfinite=skip skips steps whose loss or gradient is not finite."
            )

    def _nonfinite_names(self, pieces: ShardedState) -> list[str]:
        judged = {name: parts for name, parts in pieces.items() if name.startswith("param/") or name in self._finite}
        frozen = self._executor.local.guard.frozen
        return [name for name in nonfinite(judged) if name.removeprefix("param/") not in frozen]

    def callback_states(self) -> dict[str, Any]:
        """Return the states of the callbacks for a checkpoint."""
        return {name: state for name, callback in by_kind(list(self._callbacks)).items() if (state := callback.state())}

    def save_alone(
        self, *, metric: float | None, callbacks: Mapping[str, Any] | None = None, evaluation_due: bool = False
    ) -> bool:
        """Write a checkpoint of this step after an error, without another rank; return whether there is a new one.

        Nothing is written unless the state is certainly that of the end of the step, complete and finite. The state of
        a stream is left out: reading may have stopped in the middle of it.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written.
        """
        if self._is_sharded or not self._run.is_owner:
            return False
        self._saver.wait()
        step = self._run.state.step
        if self.has_saved or not step or not self._executor.recover(step):
            return False
        pieces = self.collect()
        if self._nonfinite_names(pieces):
            return False
        self.mark_saved()
        self.save(pieces, data=None, metric=metric, callbacks=callbacks, evaluation_due=evaluation_due)
        self._saver.wait()
        return True

    def save(
        self,
        pieces: ShardedState,
        *,
        data: Mapping[str, Any] | None,
        metric: float | None,
        callbacks: Mapping[str, Any] | None = None,
        evaluation_due: bool = False,
    ) -> None:
        """Write a checkpoint of this step, from `collect` and the state of the loader; for every rank that writes."""
        state = self._run.state
        plain, tensors = separated(self.callback_states() if callbacks is None else callbacks)
        if self._is_sharded:
            refuse_unlike(tensors, self._executor.local.all_ranks)
        if self._run.is_owner:
            pieces = {**pieces, **{name: (TensorShard.whole(tensor),) for name, tensor in tensors.items()}}
        meta = {
            "position": {"step": state.step, "tickets": []},
            "fingerprint": self._fingerprint,
            "config": self._config,
            "state": state.to_json(),
            "loss_scale": self._executor.local.loss_scale.state(),
            "callbacks": plain,
            "data": data,
            "strategy": self._executor.state_dict_extra(),
            "batch": {"global_size": self._plan.batch.global_size, "micro_size": self._plan.batch.micro_size},
            **({"evaluation_due": True} if evaluation_due else {}),
        }
        self._saver.save(step=state.step, pieces=pieces, meta=meta, metric=metric)

    def restore(self, loaded: Loaded) -> dict[str, Any] | None:
        """Continue exactly from a checkpoint; return the state of the loader."""
        self._executor.load_state_dict(select(loaded.tensors, lambda key: not key.startswith(PREFIX)))
        self._run.state.restore(loaded.meta["state"])
        local = self._executor.local
        local.set_loss_scale(local.loss_scale.restored(loaded.meta["loss_scale"]))
        for name, callback in by_kind(list(self._callbacks)).items():
            if name not in loaded.meta["callbacks"]:
                continue
            try:
                state = joined(loaded.meta["callbacks"][name], loaded.tensors)
            except KeyError as error:
                reason = f"meta.json names a tensor that is not there ({error})"
                raise damaged(loaded.checkpoint.folder, reason) from None
            callback.restore(state)
        try:
            self._executor.load_state_extra(loaded.meta.get("strategy", {}))
        except (ValueError, TypeError) as error:
            reason = f"meta.json does not hold the state of the strategy ({error})"
            raise damaged(loaded.checkpoint.folder, reason) from None
        # A checkpoint without its evaluation is written again if the evaluation finds it best.
        self._saved_at = None if loaded.meta.get("evaluation_due") else loaded.checkpoint.step
        return loaded.meta.get("data")

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and notify the callbacks; collective."""
        self._saver.wait()
        self.notify_saved()
        self._executor.local.all_ranks.sum(torch.zeros(1))

    def notify_saved(self) -> None:
        """Notify the callbacks of the checkpoints written since the last call."""
        self._prepare()
        for checkpoint in self._saver.finished():
            self._enter("callback")
            self._callbacks.call("checkpoint_saved", self._run, checkpoint.folder)

    def _prepare(self) -> None:
        """Allocate the memory of the copies once, after the first step: the optimizer has its state then.

        With a parameter server, reading the state takes as long as a save, so nothing is prepared.
        """
        plan, step = self._plan, self._run.state.step
        if self._prepared or not 0 < step < plan.last_step or plan.is_measurement or not self.writes_here:
            return
        self._prepared = True
        auxiliary = set(plan.auxiliary_ranks)
        if any(task.rank in auxiliary and not task.is_evaluator for task in plan.tasks):
            return
        self._saver.prepare(self.collect())

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and notify the callbacks."""
        self._saver.wait()
        self.notify_saved()
        self._saver.close()

    def weights_sha256(self) -> str | None:
        """Return the hash of all weights on rank 0; None elsewhere. Collective if the state is sharded."""
        if self._is_sharded:
            return sha256_of_pieces(self._executor.sharded_state_dict(), self._executor.local.all_ranks)
        return weights_sha256(self._executor.state_dict()) if self._run.is_owner else None


def snapshot_beside_steps(cfg: RunConfig, device: str, *, own_loop: bool) -> Snapshot | None:
    """Return the snapshot that copies the state of a run to the host during the next steps; None: steps wait for the
    copies.

    It takes a GPU, a step that announces its update, and the loop of trainkit: a graph of a whole step announces one
    phase, and a loop of the user's own may change a parameter between two steps.

    Example:
        >>> from trainkit.config.schema import RunConfig
        >>> snapshot_beside_steps(RunConfig(), "cuda:0", own_loop=False).overlaps
        True
        >>> snapshot_beside_steps(RunConfig(), "cpu", own_loop=False) is None
        True
    """
    beside = device.startswith("cuda") and cfg.compile.mode != "step" and not own_loop
    return Snapshot(overlaps=True) if beside else None


def retention_of(cfg: RunConfig) -> Retention:
    """Return the retention rule of a run's checkpoints."""
    settings = cfg.checkpoint
    return Retention(keep_last=settings.keep_last, keep_best=settings.keep_best, mode=MonitoredMetric.of(cfg.eval).mode)


def leaves_state_whole(error: BaseException) -> bool:
    """Return whether the state after the last step may still be valid after an error, so that it can be saved.

    Errors of trainkit mean that something is wrong with the training (numbers, replicas, checkpoints), except for those
    of data, memory and lost connections. After a second Ctrl-C nothing is saved.

    Example:
        >>> leaves_state_whole(ValueError()), leaves_state_whole(KeyboardInterrupt()), leaves_state_whole(DataError())
        (True, False, True)
    """
    if isinstance(error, TrainkitError):
        return isinstance(error, DataError | OutOfMemoryError | LinkError)
    return isinstance(error, Exception | SystemExit) and not isinstance(error, RollbackNeeded)


class LastSave:
    """Saves after an error, on rank 0, if the state is certainly valid and no other rank is needed."""

    def __init__(self, run: Run, checkpointer: Checkpointer, evaluation: EvalRunner) -> None:
        self._run, self._checkpointer, self._evaluation = run, checkpointer, evaluation
        self._training: tuple[TriggerSchedule, MetricsAccumulator, Callable[[], None]] | None = None
        self._states: dict[str, Any] | None = None

    def begin(self, timeline: TriggerSchedule, journal: MetricsAccumulator, evaluate: Callable[[], None]) -> None:
        """Record that the steps begin."""
        self._training = timeline, journal, evaluate

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Store the states of the callbacks: an evaluation that fails midway may have changed some of them."""
        states = self._checkpointer.callback_states()
        self._states = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), states)
        yield
        self._states = None

    def save(self, error: BaseException, enter: Callable[[str], None]) -> None:
        """Save the state of the training after an error, and print a line about it.

        An error of the save itself is printed and not raised: the error that ends the training is more important.
        """
        if self._training is None or not self._run.is_owner or not leaves_state_whole(error):
            return
        (timeline, journal, evaluate), step = self._training, self._run.state.step
        try:
            enter("save")
            due = timeline.is_due(evaluate, step) and not self._evaluation.is_up_to_date
            saved = journal.is_sound() and self._checkpointer.save_alone(
                metric=self._evaluation.metric, callbacks=self._states, evaluation_due=due
            )
        except Exception as problem:  # noqa: BLE001 - a device that has failed, a full disk
            reason = next(iter(str(problem).splitlines()), type(problem).__name__)
            print(f"step {step} could not be saved after the error: {reason}", file=sys.stderr, flush=True)  # noqa: T201
            return
        if saved:
            print(f"an error came after step {step}, which is saved", file=sys.stderr, flush=True)  # noqa: T201


PREFIX: Final = "callback/"
"""Prefix of the names of these tensors in a checkpoint."""
_MARK: Final = "tensor of the checkpoint"
"""The key that stands for a tensor in the JSON."""


def by_kind(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by class, the second of a class with a number: a resumed run may have another order of
    callbacks.
    """
    by_name: dict[str, Callback] = {}
    for callback in callbacks:
        kind = name_of(type(callback))
        count = sum(name.partition("#")[0] == kind for name in by_name)
        by_name[f"{kind}#{count}" if count else kind] = callback
    return by_name


def separated(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return states for JSON, and their tensors by name.

    Example:
        >>> import torch
        >>> plain, tensors = separated({"mine.Ema": {"decay": 0.9, "means": [torch.ones(2)]}})
        >>> plain["mine.Ema"]["means"], list(tensors)
        ([{'tensor of the checkpoint': 'callback/mine.Ema/means/0'}], ['callback/mine.Ema/means/0'])
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            return {_MARK: name}
        if isinstance(value, Mapping):
            return {key: plain(part, f"{name}/{key}") for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part, f"{name}/{index}") for index, part in enumerate(value)]
        return value

    return {kind: plain(state, f"{PREFIX}{kind}") for kind, state in states.items()}, tensors


def refuse_unlike(tensors: Mapping[str, Tensor], ranks: Collective) -> None:
    """Refuse tensors that are not the same on every rank: a checkpoint keeps those of rank 0. Collective.

    Raises:
        TrainingError: names the callback and the rank.
    """
    digests = {name: [list(tensor.shape), int(bits_hash(tensor))] for name, tensor in tensors.items()}
    first, *others = all_gather_object(digests, ranks)
    for rank, other in enumerate(others, start=1):
        unlike = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
        if unlike is not None:
            kind = unlike.split("/")[1]
            raise TrainingError(
                f"the state of the callback {kind} holds other tensors on rank {rank} than on rank 0, whose state is "
                f"saved. Keep only state that is the same on every rank, or use {ALL_DEVICES}."
            )


def joined(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a state of JSON with its tensors, on the CPU.

    Raises:
        KeyError: there is no such tensor.
    """
    if isinstance(state, Mapping):
        if state.keys() == {_MARK}:
            return tensors[state[_MARK]].clone()
        return {key: joined(part, tensors) for key, part in state.items()}
    return [joined(part, tensors) for part in state] if isinstance(state, list) else state
