"""Run a task that does not run the training loop: its strategy defines how it serves the training rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from trainkit.cluster.tasks import Identity
from trainkit.data.reading.loader import Loader
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.build import make_optimizer, transformed_model
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.optimizers import named_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.restore import make_step_context
from trainkit.strategies.base import Data, TaskContext


def run_auxiliary(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,  # noqa: ARG001 - auxiliary tasks do not use the folder
    *,
    requested: Callable[[], str | None],
    on_phase: Callable[[str, int], None],
) -> None:
    """Run an auxiliary task until it ends."""
    decided = plan.resolved(lambda: meta_model(plan))
    cfg, strategy = decided.cfg, decided.components.strategy
    with ExitStack() as opened:

        def open_data(device: torch.device) -> Data:
            loader = unprefetched_loader(decided, device)
            opened.callback(loader.close)
            return loader

        model = transformed_model(cfg, strategy, identity.task)
        context = TaskContext(
            identity=identity,
            model=model,
            make_optimizer=make_optimizer(cfg, model),
            optimizers=named_optimizers(cfg, decided.optimizers, model) if decided.optimizers else (),
            precision=decided.components.precision,
            numerics=decided.components.numerics,
            training=make_step_context(decided),
            num_steps=decided.num_steps,
            open_data=open_data,
            requested=requested,
            on_phase=on_phase,
        )
        strategy.run_auxiliary(context)


def unprefetched_loader(plan: RunPlan, device: torch.device) -> Loader:
    """Return a loader of training data without prefetching, for tickets that are not known beforehand."""
    return Loader(
        plan.components.datasets["train"],
        plan=plan.batch,
        shards_at=lambda _step: (),
        num_steps=0,
        reading=plan.reading(device),
    )
