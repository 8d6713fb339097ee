"""A session: one task of a run on this process, from placing the model to the last checkpoint."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from trainkit.cluster.identity import Identity
from trainkit.config.watched import Watched
from trainkit.data.evaluation import eval_batches
from trainkit.data.loader import Loader
from trainkit.engine.agreement import Agreement
from trainkit.engine.checkpoint import BackgroundSaver, Loaded, Retention, weights_sha256
from trainkit.engine.evaluate import evaluate
from trainkit.engine.events import Callback, Run, overriding
from trainkit.engine.journal import Journal
from trainkit.engine.loop import Occasion, Timeline, train
from trainkit.engine.manifest import better
from trainkit.engine.state import State
from trainkit.errors import TrainingError
from trainkit.run.building import build_model, make_optimizer
from trainkit.run.plan import RunPlan
from trainkit.run.stopping import REASONS
from trainkit.strategies.base import Placed, Strategy, Training, Update

__all__ = ["Session"]


class Session:
    """Everything that lives between the first and the last step on one rank.

    Args:
        plan: what was decided.
        identity: who this process is.
        folder: the run folder.
        callbacks: look on, in order.
        fingerprint: the hash of the maths keys.
        requested: why this process was asked to stop, or None.
        notes: what the summary shall say besides the effective values.
        confirm: raises where the folder is another group's by now; asked before anything is kept in it.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        identity: Identity,
        folder: Path,
        callbacks: list[Callback],
        fingerprint: str,
        requested: Callable[[], str | None],
        notes: tuple[str, ...] = (),
        confirm: Callable[[], None] | None = None,
    ) -> None:
        self.confirm = confirm or (lambda: None)
        self.plan, self.cfg, self.parts = plan, plan.cfg, plan.parts
        self.callbacks, self.fingerprint = callbacks, fingerprint
        self._requested = requested
        self._data_state: dict[str, Any] | None = None
        self._on_phase: Callable[[str, int], None] | None = None
        self._notes = notes
        self._cleanup = ExitStack()
        model = build_model(self.cfg)
        self.placed: Placed = self.parts.strategy.place(
            model,
            identity=identity,
            precision=self.parts.precision,
            numerics=self.parts.numerics,
            make_optimizer=make_optimizer(self.cfg, model),
        )
        self._cleanup.callback(self.parts.strategy.leave, self.placed)
        self.watched = Watched.of(self.cfg.eval)
        self.run = self._run(folder)
        self.figures: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._saved_when = time.monotonic()
        self._training = self._make_training()
        self._agreement = Agreement(self.placed.collective, requested, self._save_due)
        retention = Retention(
            keep_last=self.cfg.checkpoint.keep_last,
            keep_best=self.cfg.checkpoint.keep_best,
            mode="max" if self.watched.mode == "max" else "min",
        )
        self._saver = BackgroundSaver(
            folder / "checkpoints", retention=retention, background=self.cfg.checkpoint.background, confirm=confirm
        )

    def _run(self, folder: Path) -> Run:
        num_params = sum(param.numel() for param in self.placed.model.parameters())
        return Run(
            folder=folder,
            cfg=self.cfg,
            summary=self.plan.summary(num_params),
            plan=self.plan.batch,
            num_steps=self.plan.num_steps,
            rate=self.plan.rate,
            state=State(plan=self.plan.batch),
            is_owner=self.placed.rank == 0,
            model=self.placed.model,
            device=self.placed.device,
            collective=self.placed.collective,
            datasets=self.parts.datasets,
            notes=self._notes,
        )

    def listen(self, on_phase: Callable[[str, int], None]) -> None:
        """Be told (phase, step) whenever this rank begins something else."""
        self._on_phase = on_phase
        self.placed.on_phase = on_phase

    def _enter(self, phase: str) -> None:
        if self._on_phase is not None:
            self._on_phase(phase, self.run.state.step)

    def warn(self, message: str) -> None:
        """Add a note to the summary that is still to be shown."""
        self.run.notes = (*self.run.notes, message)

    def _make_training(self) -> Training:
        rate, max_norm = self.plan.rate, self.cfg.clip.max_norm
        return Training(
            plan=self.plan.batch,
            objective=self.parts.objective,
            weighing=self.parts.weighing,
            rule=lambda version: Update(rate.factor(version), max_norm),
        )

    def restore(self, loaded: Loaded) -> None:
        """Continue from a checkpoint as if nothing had happened."""
        self.parts.strategy.load_state(self.placed, loaded.tensors)
        self.run.state.restore(loaded.meta["state"])
        self.placed.loss_scale = self.placed.loss_scale.restored(loaded.meta["loss_scale"])
        for name, callback in _by_kind(self.callbacks).items():
            if name in loaded.meta["callbacks"]:
                callback.restore(loaded.meta["callbacks"][name])
        self.parts.strategy.recall(self.placed, loaded.meta.get("strategy", {}))
        self._saved_at = loaded.checkpoint.step
        self._data_state = loaded.meta.get("data")

    def start_from(self, loaded: Loaded) -> None:
        """Take over weights alone: a new training that begins where another ended."""
        weights = {name: tensor for name, tensor in loaded.tensors.items() if not name.startswith("optimizer/")}
        self.parts.strategy.load_state(self.placed, weights)

    def train(self) -> dict[str, Any]:
        """Run to the end, or until asked to stop; returns what result.json holds."""
        self._loader = Loader(
            self.parts.datasets["train"],
            plan=self.plan.batch,
            shards_at=lambda step: self.parts.strategy.assign(self.plan.batch, step, self.placed),
            device=self.placed.device,
            settings=self.cfg.loader,
            seed=self.cfg.seed,
            num_steps=self.plan.num_steps,
        )
        self._cleanup.callback(self._loader.close)
        found = self._loader.load_state(self._data_state) if self.run.state.step else None
        if found is not None:
            self.warn(found)
        for line in self.parts.strategy.prepare(self.placed):
            self.warn(line)
        for callback in self.callbacks:
            callback.run_start(self.run)
        self._journal = Journal(self.run, self.placed, lambda: self._loader.wait_s)
        self._log_hooks = overriding(self.callbacks, "log")
        alone = self.placed.num_ranks == 1
        # What lives by now lives to the end: the collector need not look through it again and again. With samples that
        # are read one at a time, hundreds of new objects a step, that took 5 to 10 % of a small model's step.
        gc.freeze()
        self._cleanup.callback(gc.unfreeze)
        train(
            self.run,
            strategy=self.parts.strategy,
            placed=self.placed,
            data=self._loader,
            training=self._training,
            callbacks=self.callbacks,
            journal=self._journal,
            timeline=Timeline(self._occasions(), self.run.state.step),
            last_step=self.plan.last_step,
            interrupted=self._requested if alone else lambda: None,
        )
        return self._finish()

    def close(self) -> None:
        """End workers, threads and the process group, however the training ended."""
        self._cleanup.close()

    def _occasions(self) -> list[Occasion]:
        cfg, per_epoch = self.cfg, self.plan.batch.steps_per_epoch
        found = [Occasion(act=self.flush, next_after=_every(cfg.log_every_steps))]
        if "val" in self.parts.datasets:
            found += [
                Occasion(act=self.evaluate, next_after=next_after)
                for next_after in _periods(cfg.eval.every_steps, cfg.eval.every_epochs, per_epoch)
            ]
        found += [
            Occasion(act=self.save, next_after=next_after)
            for next_after in _periods(cfg.checkpoint.every_steps, cfg.checkpoint.every_epochs, per_epoch)
        ]
        if self.placed.num_ranks > 1 and cfg.numerics.check_replicas_every is not None:
            found.append(Occasion(act=self._check_replicas, next_after=_every(cfg.numerics.check_replicas_every)))
        found.append(Occasion(act=self._agree, next_after=lambda step: step + self._agreement.interval))
        return [found[0], *(_settling(one, self.parts.strategy) for one in found[1:])]

    def flush(self) -> None:
        """Make a row of the steps since the last one and show it to the callbacks; collective."""
        row = self._journal.flush()
        if row is not None:
            for hook in self._log_hooks:
                hook(self.run, row)
        self._announce_saved()

    def evaluate(self) -> None:
        """Score the validation split; a best model is saved. Collective."""
        if self._evaluated_at == self.run.state.step:
            return
        self.flush()
        self._score("val")
        self._evaluated_at = self.run.state.step
        value, state = self.figures.get(self.watched.metric), self.run.state
        if value is not None and better(value, state.best, self.watched.mode):
            state.best = value
            if self.cfg.checkpoint.keep_best and state.step < self.plan.last_step:
                self.save()

    def _score(self, split: str) -> None:
        self._enter("evaluate")
        self._journal.pause()
        batches = eval_batches(
            self.parts.datasets[split],
            batch_size=self.cfg.eval.batch_size or max(self.plan.batch.micro_size, 256),
            rank=self.placed.rank,
            num_ranks=self.placed.num_ranks,
            device=self.placed.device,
            settings=self.cfg.loader,
        )
        figures = evaluate(self.placed, self.parts.objective, batches, split=split)
        self.figures.update(figures)
        row = {"step": self.run.state.step, "epoch": self.run.state.epoch, **figures}
        for callback in self.callbacks:
            callback.eval_end(self.run, row)
        self._journal.proceed()

    def save(self) -> None:
        """Write a checkpoint of this step, once; the owner writes it."""
        state = self.run.state
        if self._saved_at == state.step:
            return
        self.flush()
        self._saved_at, self._saved_when = state.step, time.monotonic()
        self._enter("save")
        if not self.run.is_owner:
            return
        self._journal.pause()
        fresh = self._evaluated_at == state.step
        meta = {
            "position": {"step": state.step, "tickets": []},
            "fingerprint": self.fingerprint,
            "state": state.to_json(),
            "loss_scale": self.placed.loss_scale.state(),
            "callbacks": {name: kept for name, one in _by_kind(self.callbacks).items() if (kept := one.state())},
            "data": self._loader.state(),
            "strategy": self.parts.strategy.remember(self.placed),
            "batch": {"global_size": self.plan.batch.global_size, "micro_size": self.plan.batch.micro_size},
        }
        self._saver.save(
            step=state.step,
            tensors=self.parts.strategy.state(self.placed),
            meta=meta,
            metric=self.figures.get(self.watched.metric) if fresh else None,
        )
        self._journal.proceed()

    def _announce_saved(self) -> None:
        for checkpoint in self._saver.finished():
            for callback in self.callbacks:
                callback.checkpoint_saved(self.run, checkpoint.folder)

    def _check_replicas(self) -> None:
        self._enter("evaluate")
        drifted = self.parts.strategy.check_replicas(self.placed)
        if drifted is not None:
            raise TrainingError(f"after step {self.run.state.step} the replicas are no longer equal: {drifted}")

    def _save_due(self) -> bool:
        every_s = self.cfg.checkpoint.every_s
        return every_s is not None and time.monotonic() - self._saved_when >= every_s

    def _agree(self) -> None:
        answer = self._agreement.ask()
        if answer.save:
            self.save()
        if answer.stop is not None:
            self.run.request_stop(answer.stop)

    def _finish(self) -> dict[str, Any]:
        state = self.run.state
        self.flush()
        self.parts.strategy.settle(self.placed)
        asked = self.run.stop_reason in REASONS
        cfg = self.cfg.eval
        watched = cfg.every_steps is not None or cfg.every_epochs is not None
        if not asked and (watched or state.step == self.plan.num_steps):
            if "val" in self.parts.datasets:
                self.evaluate()
            if "test" in self.parts.datasets:
                self._score("test")
        self.save()
        self._saver.wait()
        self._announce_saved()
        self._saver.close()
        self._journal.pause()
        # The owner writes to disk while the others have nothing left to do; all leave the group together.
        self.placed.collective.sum(torch.zeros(1))
        status, reason = self._status()
        sha256 = weights_sha256(self.parts.strategy.state(self.placed)) if self.run.is_owner else None
        return {"status": status, "reason": reason, **self.progress(), "weights_sha256": sha256}

    def progress(self) -> dict[str, Any]:
        """How far the run has come, as result.json says it."""
        state = self.run.state
        return {
            "steps": state.step,
            "samples": state.samples,
            "seconds": state.seconds,
            "metrics": {name: value for name, value in self.figures.items() if not math.isnan(value)},
            "fingerprint": self.fingerprint,
        }

    def _status(self) -> tuple[str, str]:
        reason, state = self.run.stop_reason, self.run.state
        if reason is not None:
            return (reason, REASONS[reason]) if reason in REASONS else ("finished", reason)
        if state.step < self.plan.num_steps:
            return "stopped", f"stop_at_step={self.cfg.stop_at_step}"
        return "finished", "all steps done"


def _by_kind(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class, the second of a kind with a number: a resumed run may have others in other places."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        count = sum(name.partition("#")[0] == kind for name in found)
        found[f"{kind}#{count}" if count else kind] = callback
    return found


def _settling(occasion: Occasion, strategy: Strategy) -> Occasion:
    """The occasion, after the next step at which replicas are alike."""
    plain = occasion.next_after
    return Occasion(act=occasion.act, next_after=lambda step: strategy.settles_at(plain(step)))


def _every(steps: int) -> Callable[[int], int]:
    return lambda step: (step // steps + 1) * steps


def _periods(every_steps: int | None, every_epochs: float | None, per_epoch: int) -> list[Callable[[int], int]]:
    found = []
    if every_steps is not None:
        found.append(_every(every_steps))
    if every_epochs is not None:
        length = every_epochs * per_epoch
        found.append(lambda step: max(step + 1, math.ceil((math.floor(step / length + 1e-9) + 1) * length - 1e-9)))
    return found
