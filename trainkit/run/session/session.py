"""A session: one task of a run on this process, from placing the model to the last checkpoint."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainkit.cluster.tasks import Identity
from trainkit.config.identity import fingerprint
from trainkit.data.reading.loader import Loader
from trainkit.data.splits import test_splits, validation_splits
from trainkit.errors import NonFiniteError, StopKind, TrainingError
from trainkit.files import Presence, write_json_atomically
from trainkit.numerics.schedules import unreduced
from trainkit.run.folder.continued import starting_weights
from trainkit.run.folder.run_result import RunResult, record_rollback, suspect_checkpoint_of
from trainkit.run.planning.build import model_transforms_of, transformed_model
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.account import Account
from trainkit.run.session.checkpointer import Checkpointer, LastSave, snapshot_beside_steps
from trainkit.run.session.evaluation import EvalRunner
from trainkit.run.session.loop_loss import LoopLoss
from trainkit.run.session.restore import (
    loader_of,
    make_run_view,
    make_step_context,
    own_loss_refusal,
    progress_of,
    refuse_foreign,
    refuse_other_steps,
    setup_request,
    time_limit_of,
    unprefetched_loader,
)
from trainkit.run.session.syncs import SyncWatch
from trainkit.strategies.base import Executor, PhaseListener, ignore_phase
from trainkit.strategies.tensor_shards import TensorShard
from trainkit.trained.build import meta_model
from trainkit.trainer.checkpoint.tensors import newest_valid, note_foreign
from trainkit.trainer.events import Callback, RollbackNeeded, Suspect
from trainkit.trainer.loop import (
    CallbackHooks,
    StopSaveConsensus,
    TrainingLoop,
    Trigger,
    TriggerSchedule,
    at_sync_points,
    every_n_steps,
    every_steps_or_epochs,
)
from trainkit.trainer.metrics_accumulator import LoggedFigures, each_of, wait_for
from trainkit.trainer.time_limit import RECORD


class TaskSession:
    """The state of one rank between the first and the last step.

    Args:
        plan: the plan of the run.
        identity: the rank.
        folder: the run folder.
        callbacks: the callbacks of the run.
        stop_requested: returns how this process was asked to stop, or None.
        check_fence: raises if another worker group owns the run folder now.
        on_phase: receives (phase, step) when this task begins another phase.
        within_steps: whether it also receives the phases within a step.
        notes: additional lines of the startup summary.
        loop_loss: holds the loss of a step of a user's own loop; None: the trainer's loop runs.
    """

    def __init__(
        self,
        plan: RunPlan,
        identity: Identity,
        folder: Path,
        *,
        callbacks: list[Callback],
        stop_requested: Callable[[], StopKind | None],
        check_fence: Callable[[], None],
        on_phase: PhaseListener,
        within_steps: bool,
        notes: tuple[str, ...] = (),
        loop_loss: LoopLoss | None = None,
    ) -> None:
        self._presence, self._check_fence = Presence(folder), check_fence
        self._stop_requested = stop_requested
        self.callbacks = CallbackHooks(callbacks, observers_end_run=plan.cfg.observer_errors == "stop")
        self._limit = time_limit_of(plan)
        length = None if self._limit is None else self._limit.length
        plan = plan.with_rates(reduced=self.callbacks.rate_factor() or unreduced, length=length)
        self.plan = plan.resolved(lambda: meta_model(plan.cfg))
        self._account, self._waits = Account(self.plan, identity), SyncWatch()
        self.cfg, self.parts = self.plan.cfg, self.plan.components
        snapshot = snapshot_beside_steps(self.cfg, identity.task.device, own_loop=loop_loss is not None)
        # With a snapshot, a GPU waits for its copies before a step changes the copied tensors.
        hears = () if snapshot is None else (snapshot.on_phase,)
        on_phase = each_of(*hears, on_phase)
        self._on_phase = self._account.heard(on_phase)
        self._data_state: dict[str, Any] | None = None
        self._evaluation_due, self._failed, self._cleanup = False, False, ExitStack()
        self._cleanup.callback(self._waits.close)
        strategy = self.parts.strategy
        training = make_step_context(self.plan, self.callbacks.gradient_listener())
        self._training = training if loop_loss is None else loop_loss.context_of(training)
        self.fingerprint, self._loop_loss, self.logged = fingerprint(plan.cfg), loop_loss, LoggedFigures()
        model = transformed_model(self.cfg, strategy, identity.task)
        on_phase("join", 0)
        in_steps = self._account.heard(on_phase if within_steps else each_of(*hears, ignore_phase))
        self._step_phase = self.callbacks.with_listeners(in_steps)
        self._opened = self._cleanup.enter_context(ExitStack())  # closed after the executor
        self.executor: Executor = strategy.setup(
            replace(
                setup_request(self.plan, identity, model),
                training=self._training,
                open_data=self._open_data,
                folder=folder,
                graphs=model_transforms_of(self.cfg).graph_settings,
                on_phase=self._step_phase,
            )
        )
        self._cleanup.callback(lambda: self.executor.close(failed=self._failed))
        self.run = make_run_view(self.plan, self.executor, folder, notes, measure=self._measure, limit=self._limit)
        self._scorer = EvalRunner(
            plan=self.plan, run=self.run, executor=self.executor, callbacks=self.callbacks, enter=self.enter
        )
        self._keeper = Checkpointer(
            self.plan,
            self.run,
            self.executor,
            callbacks=self.callbacks,
            fingerprint=self.fingerprint,
            confirm=self.check_fence,
            enter=self.enter,
            snapshot=snapshot,
        )
        self._last = LastSave(self.run, self._keeper, self._scorer)
        ranks, save_due = self.executor.local.all_ranks, lambda: self._keeper.is_due
        self._agreement = StopSaveConsensus(ranks, stop_requested, save_due, self._limit)

    def check_fence(self) -> None:
        """Check that the run folder exists and still belongs to this group.

        Raises:
            StorageError: it was removed.
            TrainingError: another group has taken it over.
        """
        self._presence.check()
        self._check_fence()

    def _refuse_absent_folder(self) -> None:
        """Raise on rank 0 if the run folder was removed: further training could not be saved."""
        if self.run.is_owner:
            self._presence.check()

    def _open_data(self, device: torch.device) -> Loader:
        loader = unprefetched_loader(self.plan, device)
        self._opened.callback(loader.close)
        return loader

    def enter(self, phase: str) -> None:
        """Report that this rank begins a phase."""
        self._on_phase(phase, self.run.state.step)

    def warn(self, message: str) -> None:
        """Add a note to the startup summary, before it is printed."""
        self.run.add_note(message)

    def restore_or_init(self) -> None:
        """Continue from this folder's newest complete checkpoint, else start from the weights that `init_from` names.

        A rollback uses this too. A run that continues another one has the checkpoints of that run in its own folder.
        """
        run, checkpoints = self.run, self.run.folder / "checkpoints"
        self.enter("load")
        exists = os.path.lexists(checkpoints)  # absent before the first save of a new run
        check = partial(refuse_foreign, folder=run.folder)
        newest = newest_valid(checkpoints, report=self.warn, check=check) if exists else None
        if newest is not None:
            self._data_state = self._keeper.restore(newest)
            if run.state.own_loss and self._loop_loss is None:
                raise own_loss_refusal(newest.checkpoint.folder)
            self._evaluation_due = newest.meta.get("evaluation_due") is True and bool(self.validated)
            self._scorer.recall_best(self.warn)
        elif self.cfg.init_from is not None:
            self.executor.load_state_dict(starting_weights(self.cfg, report=self.warn))
        if exists:
            note_foreign(checkpoints, run.state.step, self.warn)
        refuse_other_steps(run.state.step, self.executor.local.all_ranks)
        if self._limit is not None:  # the seconds of a checkpoint are the same on every rank
            state = run.state
            self._keep_time(self._limit.estimate(state.step, state.seconds - state.compile_s))
        if self.cfg.numerics.on_nonfinite == "rollback":
            run.state.left_out.train_again(suspect_checkpoint_of(run.folder, checkpoint=run.state.step))

    def train(self) -> dict[str, Any]:
        """Train to the last step, or until asked to stop; return the content of result.json."""
        self.begin()
        with self.keeping_last_checkpoint():
            while True:
                try:
                    self.new_loop().train()
                except RollbackNeeded as rollback:
                    self.roll_back(rollback.step)
                else:
                    return self.finish()

    def begin(self) -> None:
        """Prepare everything that the first step needs."""
        self.enter("data")
        self._open_loader()
        self._cleanup.callback(lambda: self._loader.close())  # noqa: PLW0108 - the one that is open then
        for line in self.executor.tune():
            self.warn(line)
        self.run.begin_steps()
        self.callbacks.call("run_start", self.run)
        self._journal.proceed()  # the start is no time of training
        # Objects that exist now live to the end; garbage collections over them took 5 to 10 % of a small model's step.
        gc.freeze()
        self._cleanup.callback(gc.unfreeze)
        if self.cfg.numerics.on_nonfinite == "rollback":
            self.save()  # a rollback before the first regular checkpoint needs one to restore

    @contextmanager
    def keeping_last_checkpoint(self) -> Iterator[None]:
        """Complete the checkpoint that is being written if the steps inside end with a value that is not finite."""
        try:
            yield
        except NonFiniteError:
            self.enter("save")
            self._keeper.wait()  # all ranks raise the error at the same step
            raise

    def _open_loader(self) -> None:
        """Start to read the data at the current step of the run."""
        self._loader = loader_of(self.plan, self.executor.local.device, self.executor.assign)
        terms = self._training.objective.term_names
        self._journal = self._account.journal(self.run, self.executor.local, lambda: self._loader.wait_s, terms=terms)
        note = self._loader.load_state(self._data_state) if self.run.state.step else None
        self._data_state = None
        if note is not None:
            self.warn(note)

    def new_loop(self) -> TrainingLoop:
        """Return the loop from the current step to the last one."""
        if self._evaluation_due:  # it is still due if an error prevented it in the previous start
            self._evaluation_due = False
            self.evaluate()
        timeline = TriggerSchedule(self._triggers(), self.run.state.step)
        self._last.begin(timeline, self._journal, self.evaluate)
        interrupted = self._stop_requested if self._limit is None else self._interrupted
        checks_always = self.callbacks.change_steps or self._loader.calls_own_code
        return TrainingLoop(
            run=self.run,
            executor=self.executor,
            data=self._loader,
            step_end=self.callbacks.of("step_end"),
            journal=self._journal,
            timeline=timeline,
            last_step=self.run.state.step if self.run.stop_reason is not None else self.plan.last_step,
            next_sync_step=self.plan.next_sync_step,
            interrupted=interrupted if self.executor.local.all_ranks.num_ranks == 1 else None,
            on_phase=self._step_phase,
            expect_unchanged=(lambda: None) if checks_always else self.executor.expect_unchanged,
            on_acted=lambda: self.enter("data"),
        )

    def roll_back(self, step: int) -> None:
        """Restore the last checkpoint, in order to repeat the steps up to one that was not finite; collective."""
        self.enter("save")
        self._keeper.wait()
        self.restore_or_init()
        suspect = Suspect(step=step, checkpoint=self.run.state.step)
        if self.run.is_owner:
            self.check_fence()
            record_rollback(self.run.folder, suspect)
        self.run.state.left_out.train_again(suspect)
        self._scorer.forget()
        self.enter("data")
        self._loader.close()
        self._open_loader()
        self.callbacks.call("rolled_back", self.run, step)

    def save_last(self, error: BaseException) -> None:
        """Save after an error, if the state is certainly valid and no other rank is needed."""
        if not self.plan.is_measurement:
            self._last.save(error, self.enter)

    def close(self, *, failed: bool = False) -> None:
        """End workers, threads and the process group; if this rank has failed, without waiting for the others."""
        self._failed = failed
        self._cleanup.close()

    def _triggers(self) -> list[Trigger]:
        cfg, per_epoch = self.cfg, self.plan.batch.steps_per_epoch
        triggers = [Trigger(act=self.flush, next_after=every_n_steps(cfg.log_every_steps))]
        if self.validated:
            act = self.save if self.plan.has_evaluator else self.evaluate
            triggers += every_steps_or_epochs(act, cfg.eval.every_steps, cfg.eval.every_epochs, per_epoch)
        triggers += every_steps_or_epochs(self.save, cfg.checkpoint.every_steps, cfg.checkpoint.every_epochs, per_epoch)
        if self.executor.local.all_ranks.num_ranks > 1 and cfg.numerics.check_replicas_every is not None:
            triggers.append(
                Trigger(act=self._check_replicas, next_after=every_n_steps(cfg.numerics.check_replicas_every))
            )
        triggers.append(Trigger(act=self._sync_stop_and_save, next_after=lambda step: step + self._agreement.interval))
        later = [at_sync_points(trigger, self.plan.next_sync_step) for trigger in triggers[1:]]
        before, after = self._waits.triggers(self.run)
        return [*before, triggers[0], *self._account.triggers(self.run, self._journal, self._scorer), *later, *after]

    def flush(self, *, is_last: bool = False) -> None:
        """Aggregate the steps since the last row into one row, and pass it to the callbacks; collective."""
        row = self.logged.added_to(self._journal.flush(), end_of=self.run if is_last else None)
        if row is not None:
            self.enter("callback")
            self.callbacks.log_row(self.run, row)
        self._keeper.notify_saved()

    def evaluate(self) -> None:
        """Evaluate the validation splits, and save a new best model. Collective."""
        if self._scorer.is_up_to_date:
            return
        self.flush()
        with self._last.evaluating():
            self._score(self.validated)
        # Beside an evaluator, which judges checkpoints, one that is written again would be evaluated twice.
        if self._scorer.update_best() and self.cfg.checkpoint.keep_best and not self.plan.has_evaluator:
            self._keeper.save_again()  # a checkpoint of this step that was saved before has no metric
            if self.run.state.step < self.plan.last_step:
                self.save()

    def _measure(self, split: str, dataset: Any) -> dict[str, float]:
        """Evaluate for a callback; collective."""
        self._scorer.refuse_here(split, dataset)
        paused = self._journal.is_paused
        self.enter("evaluate")
        self._journal.pause()
        self.executor.refresh_model()
        evaluation = self._scorer.measure(split, dataset)
        if not paused:
            self._journal.proceed()
        self.enter("callback")
        return evaluation.figures

    @property
    def validated(self) -> list[str]:
        """The splits that are evaluated during the training."""
        return validation_splits(self.parts.datasets)

    @property
    def figures(self) -> Mapping[str, float]:
        """The newest value of each metric of an evaluation."""
        return self._scorer.figures

    def _score(self, splits: Sequence[str]) -> None:
        self.enter("evaluate")
        self._journal.pause()
        self.executor.refresh_model()
        self._scorer.score(splits)
        self._journal.proceed()

    def save(self) -> None:
        """Write a checkpoint of this step, once; rank 0 writes it, or each rank its shards."""
        if self._keeper.has_saved or self.plan.is_measurement:
            return
        step, local = self.run.state.step, self.executor.local
        local.refuse_changed_params(step, flags=step < self.plan.num_steps)
        self.flush()
        self.enter("save")
        self._journal.pause()
        self._refuse_absent_folder()
        counted = {} if self._scorer.averages is None else self._scorer.averages.statistics()
        pieces = self._keeper.collect()
        if self.run.is_owner:
            pieces = {**pieces, **{name: (TensorShard.whole(tensor),) for name, tensor in counted.items()}}
        self._keeper.refuse_nonfinite(pieces)
        self._keeper.mark_saved()
        if self._limit is not None and self.run.is_owner:
            record = {"version": 1, "stop_after": self.cfg.stop_after, "lengths": self._limit.lengths}
            write_json_atomically(self.run.folder / RECORD, record)
        if self._keeper.writes_here:
            data = self._loader.state() if self._data_state is None else self._data_state
            self._keeper.save(pieces, data=data, metric=self._scorer.metric)
        self._journal.proceed()

    def _check_replicas(self) -> None:
        self.enter("evaluate")
        drifted = self.executor.check_replicas()
        if drifted is not None:
            raise TrainingError(f"after step {self.run.state.step} the replicas are no longer equal: {drifted}")

    def _sync_stop_and_save(self) -> None:
        self._refuse_absent_folder()
        if self._limit is not None:
            wait_for(self.run.device)  # a GPU may be many steps behind the clock
        answer = self._agreement.ask(self.run.state.step, self._journal.training_s)
        self._keep_time(answer.length)
        self._keeper.notify_saved()
        if answer.save:
            self.save()
        if answer.stop is not None:
            self.run.request_stop(answer.stop, kind=answer.stop)

    def _interrupted(self) -> StopKind | None:
        """Return how the only process was asked to stop; also end the training if its time is used up."""
        limit = self._limit
        if limit is not None and not limit.repeats and self._journal.training_s >= limit.seconds:
            self._keep_time(self.run.state.step)
        return self._stop_requested()

    def _keep_time(self, length: int) -> None:
        """Record the estimated length of the training, and end it if its time is used up; the same on every rank."""
        run, limit = self.run, self._limit
        if limit is not None and limit.take(run.state.step, length):
            run.request_stop(f"stop_after={self.cfg.stop_after}")

    def count_compiling(self, seconds: float) -> None:
        """Count a time in which torch.compile worked, if the clock of the training ran."""
        if not self._journal.is_paused:
            self.run.state.compile_s += seconds

    def finish(self) -> dict[str, Any]:
        """End a training regularly: evaluate, save, and leave the process group together; return the content of
        result.json. Collective.
        """
        state = self.run.state
        self.flush(is_last=True)
        for step in self.executor.sync():
            state.left_out.take(step)
        self.executor.refresh_model()
        stopped = self.run.stop_kind is not None
        self._data_state = self._loader.state()  # statistics of averages may read the training data again
        if not stopped and self._scorer.averages is not None and self._scorer.averages.end_early():
            self._scorer.forget()
            self._keeper.save_again()
        is_due = (self.cfg.eval.every_steps, self.cfg.eval.every_epochs) != (None, None)
        is_due = is_due or (self._limit is not None and self._limit.is_over(state.step))
        if not stopped and (is_due or state.step == self.plan.num_steps):
            if self.validated:
                self.evaluate()
            if tests := test_splits(self.parts.datasets):
                self._score(tests)
        self.save()
        self.enter("save")
        self._keeper.close()
        self.enter("end")
        self._journal.pause()
        # Rank 0 still writes to disk when the others have finished; all leave the process group together.
        self.executor.local.all_ranks.sum(torch.zeros(1))
        result = {**RunResult.of_run(self.run).content(), **self.progress(), **self.executor.result_extra()}
        result["weights_sha256"] = self._keeper.weights_sha256()
        self.callbacks.call("train_end", self.run, result)
        return result

    def progress(self) -> dict[str, Any]:
        """Return the progress of the run, as recorded in result.json."""
        failed = {"callback_errors": errors} if (errors := self.callbacks.failures) else {}
        content = {**progress_of(self.run), **self._scorer.results(), **failed, "fingerprint": self.fingerprint}
        remarks = {"changes": self.cfg.changes, "notes": list(self.run.notes)}
        return {**content, **{name: lines for name, lines in remarks.items() if lines}, **self._account.result()}
