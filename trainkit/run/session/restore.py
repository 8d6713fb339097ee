"""Build the initial state of a run on each rank: its links to the process, the view for callbacks, the step context,
and the checkpoint to continue from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from trainkit.cluster.tasks import Identity
from trainkit.data.reading.loader import Loader
from trainkit.errors import CheckpointError, ConfigError, Problem
from trainkit.files import Kind, expect_map, expect_maps
from trainkit.numerics.batch import Positions, Ticket
from trainkit.objectives.base import Collective
from trainkit.run.folder.run_result import rollbacks_of
from trainkit.run.planning.build import make_optimizer, named_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import Executor, GradientListener, SetupRequest, StepContext, UpdateParams
from trainkit.trained.build import meta_model
from trainkit.trainer.checkpoint.tensors import Loaded, meta_of
from trainkit.trainer.events import LeftOutSteps, Measure, Run, State
from trainkit.trainer.manifest import MANIFEST, damaged, list_complete, read_manifest
from trainkit.trainer.ownership import OwnershipToken
from trainkit.trainer.time_limit import TimeLimit, expect_lengths, read_record

_META: Final[Mapping[str, Kind]] = {"state": dict, "loss_scale": dict, "callbacks": dict}
_LATER: Final[Mapping[str, Kind]] = {"data": (dict, type(None)), "strategy": dict, "evaluation_due": bool}
"""Keys that earlier versions did not write -> their types."""
_STATE: Final[Mapping[str, Kind]] = {
    "step": int, "seconds": float, "best": (float, type(None)), "retries": int, "left_out": dict,
}  # fmt: skip
_LOSS_SCALE: Final[Mapping[str, Kind]] = {"scale": float, "good_steps": int, "overflows": int}
_LEFT_OUT: Final[Mapping[str, Kind]] = {"count": int, "steps": list, "first": int, "last": int}
_STREAM: Final[Mapping[str, Kind]] = {"epoch": int, "position": int}


def refuse_malformed(loaded: Loaded) -> None:
    """Refuse a checkpoint with a malformed meta.json; the previous checkpoint is then used.

    Raises:
        CheckpointError: a key is missing, of another type, or contradicts the manifest.
    """
    meta, step = loaded.meta, loaded.checkpoint.step
    try:
        expect_map(meta, _META, optional=_LATER)
        state = expect_map(meta["state"], _STATE, optional={"own_loss": bool, "lengths": list, "compile_s": float})
        expect_lengths(state.get("lengths", []))
        expect_map(meta["loss_scale"], _LOSS_SCALE)
        expect_maps(expect_map(state["left_out"], _LEFT_OUT)["steps"], {"step": int})
        if meta.get("data") is not None:
            expect_map(meta["data"], {}, optional=_STREAM)
        if state["step"] != step:
            raise ValueError(f"its step is {state['step']}, and that of the manifest {step}")
    except ValueError as error:
        raise damaged(loaded.checkpoint.folder, f"meta.json has changed since it was written ({error})") from None


def make_run_view(
    plan: RunPlan,
    executor: Executor,
    folder: Path,
    notes: tuple[str, ...],
    *,
    measure: Measure,
    limit: TimeLimit | None = None,
) -> Run:
    """Return the view of a starting run for callbacks; `Run.evaluate` calls `measure`."""
    local, facts = executor.local, plan.components.strategy.facts
    # if the model is sharded, this rank may hold only a part of it
    model = meta_model(plan.cfg) if facts.is_sharded else local.model
    num_params = sum(param.numel() for param in model.parameters())
    return Run(
        folder=folder,
        cfg=plan.cfg,
        summary=plan.summary(num_params),
        plan=plan.batch,
        num_steps=plan.num_steps,
        rate=plan.rate,
        rates={optimizer.name: optimizer.rate for optimizer in plan.optimizers},
        state=State(
            plan=plan.batch,
            left_out=LeftOutSteps(plan.cfg.numerics, samples_of(plan)),
            lengths=[] if limit is None else limit.lengths,  # one list: a checkpoint restores those of the limit
        ),
        is_owner=local.is_rank0,
        model=local.model,
        device=local.device,
        collective=local.data_ranks,
        computes_together=facts.forward_is_collective,
        datasets=plan.components.datasets,
        notes=notes,
        findings=executor.result_extra,
        measure=measure,
    )


def time_limit_of(plan: RunPlan) -> TimeLimit | None:
    """Return the time limit of a run, or the record that takes its place; None without `stop_after`."""
    seconds, record = plan.stop_after_s, plan.cfg.stop_after_record
    if seconds is None:
        return None
    lengths = [] if record is None else read_record(Path(record).expanduser(), str(plan.cfg.stop_after))
    return TimeLimit(seconds=seconds, most=plan.num_steps, lengths=lengths, repeats=record is not None)


def samples_of(plan: RunPlan) -> Callable[[Ticket], Sequence[int]]:
    """Return a function that returns the samples of a ticket: indices of the dataset, or positions in a stream."""
    cfg, hooks = plan.cfg, plan.components.hooks
    order = hooks.order(plan.components.datasets["train"], plan.batch, seed=cfg.seed, shuffle=cfg.loader.shuffle)
    positions = Positions(plan.batch, order)
    return lambda ticket: positions.indices(ticket).tolist()


def make_step_context(plan: RunPlan, on_gradients: GradientListener | None = None) -> StepContext:
    """Return the settings that every step of a plan needs; without a listener, gradients are not observed."""
    return StepContext(
        plan=plan.batch,
        objective=plan.components.objective,
        weighing=plan.components.weighing,
        rule=partial(UpdateParams.at, plan.rate, plan.cfg.clip.max_norm),
        phases=plan.phases,
        on_gradients=on_gradients,
    )


def setup_request(plan: RunPlan, identity: Identity, model: nn.Module) -> SetupRequest:
    """Return what a task of a plan needs to build its share of a training; its data is not prefetched."""
    return SetupRequest(
        model=model,
        identity=identity,
        precision=plan.components.precision,
        numerics=plan.components.numerics,
        make_optimizer=make_optimizer(plan.cfg, model),
        optimizers=named_optimizers(plan.cfg, plan.optimizers, model) if plan.optimizers else (),
        training=make_step_context(plan),
        open_data=lambda device: unprefetched_loader(plan, device),
    )


def unprefetched_loader(plan: RunPlan, device: torch.device) -> Loader:
    """Return a loader of training data without prefetching, for tickets that are not known beforehand."""
    return loader_of(plan, device, lambda _step: (), num_steps=0)


def loader_of(
    plan: RunPlan, device: torch.device, shards_at: Callable[[int], tuple[int, ...]], *, num_steps: int | None = None
) -> Loader:
    """Return the loader of the batches of some shards of each step, from any step on."""
    return Loader(
        plan.components.datasets["train"],
        plan=plan.batch,
        shards_at=shards_at,
        num_steps=plan.num_steps if num_steps is None else num_steps,
        reading=plan.reading(device),
    )


def refuse_foreign(loaded: Loaded, folder: Path) -> None:
    """Refuse a checkpoint in the folder of a run that the run did not write, or whose metadata is malformed."""
    owner = OwnershipToken.find(folder)
    if owner is not None and loaded.checkpoint.owner != owner.token:
        raise CheckpointError(f"checkpoint {loaded.checkpoint.folder} was not written by this run.")
    refuse_malformed(loaded)


def refuse_other_steps(step: int, ranks: Collective) -> None:
    """Raise if ranks see different checkpoints: they would train different things, or wait for ever; collective."""
    if ranks.num_ranks > 1:
        steps = [int(tensor.item()) for tensor in ranks.gather(torch.tensor([step]))]
        if len(set(steps)) > 1:
            text = ", ".join(f"rank {rank} that of step {step}" for rank, step in enumerate(steps))
            raise CheckpointError(f"the ranks see different checkpoints: {text}. The run folder is not shared by all.")


def progress_of(run: Run) -> dict[str, Any]:
    """Return the progress of a run, and its skipped and repeated steps."""
    state = run.state
    facts = {"steps": state.step, "samples": state.samples, "seconds": state.seconds, **state.left_out.findings()}
    if state.own_loss:
        facts["own_loss"] = True
    return facts if run.cfg.numerics.on_nonfinite != "rollback" else {**facts, "rollbacks": rollbacks_of(run.folder)}


def own_loss_refusal(checkpoint: Path) -> ConfigError:
    """Return the error of a training that only the user's own loop can continue, because it gave the losses."""
    rule = "has steps with a loss from its own loop (trainkit.session). Continue it with its script and resume=RUN."
    return ConfigError([Problem(key="resume", value=str(checkpoint), rule=rule)])


def refuse_own_losses(checkpoints: Path) -> None:
    """Refuse to continue a training with losses of a user's own loop in a process without such a loop.

    Args:
        checkpoints: a folder of checkpoints, or one checkpoint.

    Raises:
        ConfigError: the newest checkpoint has steps with such a loss.
    """
    with contextlib.suppress(CheckpointError):  # a damaged one is reported when it is restored
        newest = [read_manifest(checkpoints)] if (checkpoints / MANIFEST).is_file() else list_complete(checkpoints)[:1]
        states = [meta_of(checkpoint).get("state") for checkpoint in newest]
        if any(isinstance(state, dict) and state.get("own_loss") is True for state in states):
            raise own_loss_refusal(newest[0].folder)
