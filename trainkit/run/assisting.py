"""What a task does that does not run the loop: it assists the rank that trains, as its strategy says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from trainkit.cluster.identity import Identity
from trainkit.data.loader import Loader
from trainkit.run.beginning import training_of
from trainkit.run.building import make_optimizer, shaped_model
from trainkit.run.folder import RunFolder
from trainkit.run.memory import abstract_model
from trainkit.run.out_of_memory import telling_of_memory
from trainkit.run.plan import RunPlan
from trainkit.strategies.base import Bench, Data

__all__ = ["assist", "unforeseen_data"]


def assist(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,  # noqa: ARG001 - what tasks share is not a folder
    *,
    requested: Callable[[], str | None],
    on_phase: Callable[[str, int], None],
) -> None:
    """Do the part of one task of a run, to its end.

    Args:
        plan: the run.
        identity: who this process is: a task that `Strategy.trains` says no to.
        folder: the run folder, which is not this task's to write into.
        requested: why this process was asked to stop, or None. The rank that trains was asked as well.
        on_phase: is told (phase, step) whenever this task begins something else.
    """
    decided = plan.decided(lambda: abstract_model(plan))
    cfg, strategy, reached = decided.cfg, decided.parts.strategy, [0]

    def enter(phase: str, step: int) -> None:
        reached[0] = step
        on_phase(phase, step)

    with telling_of_memory(plan, identity.task, lambda: reached[0]), ExitStack() as opened:

        def open_data(device: torch.device) -> Data:
            loader = unforeseen_data(decided, device)
            opened.callback(loader.close)
            return loader

        model = shaped_model(cfg, strategy)
        bench = Bench(
            identity=identity,
            model=model,
            make_optimizer=make_optimizer(cfg, model),
            precision=decided.parts.precision,
            numerics=decided.parts.numerics,
            training=training_of(decided),
            num_steps=decided.num_steps,
            open_data=open_data,
            requested=requested,
            on_phase=enter,
        )
        strategy.assist(bench)


def unforeseen_data(plan: RunPlan, device: torch.device) -> Loader:
    """Training data by tickets that nobody knows beforehand: nothing is read ahead.

    Args:
        plan: the run.
        device: where batches are wanted.
    """
    return Loader(
        plan.parts.datasets["train"],
        plan=plan.batch,
        shards_at=lambda _step: (),
        device=device,
        settings=plan.cfg.loader,
        seed=plan.cfg.seed,
        num_steps=0,
    )
