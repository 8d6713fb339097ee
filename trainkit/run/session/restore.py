"""What a run begins with on each rank: what callbacks see, what a step needs, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from trainkit.config.schema import RunConfig
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import Loader
from trainkit.data.reading.positions import Positions
from trainkit.errors import CheckpointError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.order import SampleOrder
from trainkit.run.folder.rollbacks import suspect_checkpoint_of
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.saved_state import refuse_malformed
from trainkit.strategies.base import Placed, StepContext, UpdateParams
from trainkit.trainer.checkpoint import Loaded, load, newest_valid
from trainkit.trainer.checkpoint.loading import note_foreign
from trainkit.trainer.events import Run
from trainkit.trainer.left_out import LeftOutSteps
from trainkit.trainer.ownership import OwnershipToken
from trainkit.trainer.state import State

__all__ = ["loader_of", "make_run_view", "make_step_context", "restore_or_init", "samples_of"]


class RestoreTarget(Protocol):
    """The part of a session that takes up a checkpoint."""

    cfg: RunConfig
    run: Run
    placed: Placed

    def enter(self, phase: str) -> None:
        """Tell that something else begins."""

    def warn(self, message: str) -> None:
        """Tell the user."""

    def restore(self, loaded: Loaded) -> None:
        """Continue."""

    def start_from(self, loaded: Loaded) -> None:
        """Take over weights."""


def make_run_view(plan: RunPlan, placed: Placed, folder: Path, notes: tuple[str, ...]) -> Run:
    """What callbacks see of a run that begins."""
    # of a replica that spans ranks this one may hold but a part
    model = meta_model(plan) if plan.components.strategy.holds_pieces else placed.model
    num_params = sum(param.numel() for param in model.parameters())
    return Run(
        folder=folder,
        cfg=plan.cfg,
        summary=plan.summary(num_params),
        plan=plan.batch,
        num_steps=plan.num_steps,
        rate=plan.rate,
        state=State(plan=plan.batch, left_out=LeftOutSteps(plan.cfg.numerics, samples_of(plan))),
        is_owner=placed.is_rank0,
        model=placed.model,
        device=placed.device,
        collective=placed.data_ranks,
        computes_together=plan.components.strategy.computes_together,
        datasets=plan.components.datasets,
        notes=notes,
        findings=lambda: plan.components.strategy.findings(placed),
    )


def samples_of(plan: RunPlan) -> Callable[[Ticket], Sequence[int]]:
    """Return what gives the samples of a ticket: indices of the dataset, or positions in a stream."""
    shuffle = plan.cfg.loader.shuffle and not isinstance(plan.components.datasets["train"], Stream)
    order = SampleOrder(num_samples=plan.batch.num_samples, seed=plan.cfg.seed, shuffle=shuffle)
    positions = Positions(plan.batch, order)
    return lambda ticket: positions.indices(ticket).tolist()


def make_step_context(plan: RunPlan) -> StepContext:
    """What every step of a plan needs."""
    rate, max_norm = plan.rate, plan.cfg.clip.max_norm
    return StepContext(
        plan=plan.batch,
        objective=plan.components.objective,
        weighing=plan.components.weighing,
        rule=lambda version: UpdateParams(rate.factor(version), max_norm),
    )


def loader_of(plan: RunPlan, placed: Placed) -> Loader:
    """Return what reads the batches of a rank, from any step on."""
    return Loader(
        plan.components.datasets["train"],
        plan=plan.batch,
        shards_at=lambda step: plan.components.strategy.assign(plan.batch, step, placed),
        device=placed.device,
        settings=plan.cfg.loader,
        seed=plan.cfg.seed,
        num_steps=plan.num_steps,
    )


def restore_or_init(session: RestoreTarget, checkpoints: Path) -> None:
    """Continue this folder's newest whole checkpoint, else start from the one that `resume` or `init_from` names.

    Also where a training rolls back: it then continues a checkpoint of its own, or the one that it was resumed from.
    """
    cfg = session.cfg
    session.enter("load")
    own = newest_valid(checkpoints, report=session.warn, check=lambda found: _refuse_strange(found, session.run.folder))
    if own is not None:
        session.restore(own)
    elif cfg.resume not in (None, "auto"):
        session.restore(_load(Path(str(cfg.resume)), session, check=refuse_malformed))
    elif cfg.init_from is not None:  # the user named it: a link to it is followed
        session.start_from(_load(Path(cfg.init_from).expanduser().resolve(), session))
    note_foreign(checkpoints, session.run.state.step, session.warn)
    _refuse_other_steps(session)
    if cfg.numerics.on_nonfinite == "rollback":
        state = session.run.state
        state.left_out.train_again(suspect_checkpoint_of(session.run.folder, checkpoint=state.step))


def _refuse_strange(loaded: Loaded, folder: Path) -> None:
    """Refuse a checkpoint in the folder of a run that the run did not write, or that does not fit."""
    owner = OwnershipToken.found(folder)
    if owner is not None and not owner.wrote(loaded.checkpoint.owner):
        raise CheckpointError(f"checkpoint {loaded.checkpoint.folder} was not written by this run.")
    refuse_malformed(loaded)


def _refuse_other_steps(session: RestoreTarget) -> None:
    """A rank that sees other checkpoints than the others would train something else, or wait for ever; collective."""
    if session.placed.all_ranks.num_ranks > 1:
        found = session.placed.all_ranks.gather(torch.tensor([session.run.state.step]))
        steps = [int(step.item()) for step in found]
        if len(set(steps)) > 1:
            seen = ", ".join(f"rank {rank} that of step {step}" for rank, step in enumerate(steps))
            raise CheckpointError(f"the ranks see different checkpoints: {seen}. The run folder is not shared by all.")


def _load(path: Path, session: RestoreTarget, *, check: Callable[[Loaded], None] = lambda _: None) -> Loaded:
    """A checkpoint folder, or the newest whole one of a run or `checkpoints` folder."""
    if (path / "manifest.json").is_file():
        loaded = load(path)
        check(loaded)
        return loaded
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest_valid(root, report=session.warn, check=check)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint.")
    return found
