"""Train a few steps at one common cut, and read the weights after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from trainkit.cluster.identity import Identity
from trainkit.config.schema import RunConfig
from trainkit.data.loader import Loader
from trainkit.engine.checkpoint import load, scan
from trainkit.errors import ConfigError, DataError
from trainkit.run.building import build_model, make_optimizer
from trainkit.run.plan import RunPlan
from trainkit.run.runner import train
from trainkit.strategies.base import Ticket, Training, Update
from trainkit.strategies.forward_backward import StepWork
from trainkit.strategies.one_device import OneDevice

__all__ = ["Weights", "bare", "names_without_gradient", "reference_weights", "weights_by_step", "with_precision"]

Weights = Mapping[int, Mapping[str, Tensor]]
"""Updates -> `param/...` or `buffer/...` -> tensor."""

_PRECISION: Final = "trainkit.numerics.precision.Precision"
_NO_GRADIENT: Final = 1e-12
"""A gradient below this share of the model's is zero but for rounding; AdamW turns such rounding into full steps."""


def bare(cfg: RunConfig, steps: int) -> RunConfig:
    """Return the config with a checkpoint after every step, and without evaluation, callbacks and loggers."""
    return replace(
        cfg,
        stop_at_step=steps,
        resume=None,
        quiet=True,
        callbacks={},
        logger={},
        log_every_steps=1,
        eval=replace(cfg.eval, every_steps=None, every_epochs=None),
        checkpoint=replace(
            cfg.checkpoint, every_steps=1, every_epochs=None, keep_last=1 << 30, keep_best=0, background=False
        ),
    )


def with_precision(cfg: RunConfig, value: str) -> RunConfig:
    """Return the config with another precision."""
    return replace(cfg, precision={"_target_": _PRECISION, "value": value})


def reference_weights(
    cfg: RunConfig, folder: Path, say: Callable[[str], None]
) -> tuple[str, dict[int, dict[str, Tensor]]]:
    """Train the reference in fp64, or in fp32 where the model does not run in fp64.

    Returns:
        The precision that was used, and the weights after every step.
    """
    try:
        say("reference: one_device in fp64")
        return "fp64", weights_by_step(with_precision(cfg, "fp64"), folder / "reference_fp64")
    except (ConfigError, DataError):
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        say(f"the model does not run in fp64 ({str(error).splitlines()[0]}); reference: one_device in fp32")
        return "fp32", weights_by_step(with_precision(cfg, "fp32"), folder / "reference_fp32")


def weights_by_step(cfg: RunConfig, folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train in a folder, and return the weights after every step that has a checkpoint."""
    train(cfg, run_dir=folder)
    found = sorted(scan(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {one.step: _weights(load(one.folder).tensors) for one in found}


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}


def names_without_gradient(plan: RunPlan) -> frozenset[str]:
    """Return the parameters whose gradient in the first step is zero but for rounding."""
    model = build_model(plan.cfg)
    device = plan.tasks[0].device
    placed = OneDevice().place(
        model,
        identity=Identity.solo(device),
        precision=plan.parts.precision,
        numerics=plan.parts.numerics,
        make_optimizer=make_optimizer(plan.cfg, model),
    )
    shards = tuple(range(plan.batch.num_shards(0)))
    loader = Loader(
        plan.parts.datasets["train"],
        plan=plan.batch,
        shards_at=lambda _: shards,
        device=placed.device,
        settings=plan.cfg.loader,
        seed=plan.cfg.seed,
        num_steps=1,
    )
    training = Training(
        plan=plan.batch,
        objective=plan.parts.objective,
        weighing=plan.parts.weighing,
        rule=lambda _: Update(1.0, None),
    )
    try:
        ticket = Ticket(0, OneDevice().assign(plan.batch, 0, placed))
        sums: Sequence[Any] = StepWork(placed, ticket, loader.fetch(ticket), training).run()
    finally:
        loader.close()
    norms = {f"param/{name}": _norm(grad) for name, grad in zip(placed.params, sums, strict=False)}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    return frozenset(name for name, norm in norms.items() if norm < _NO_GRADIENT * whole)


def _norm(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.norm())
