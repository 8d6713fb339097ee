"""Proof: the same training under several strategies, compared parameter by parameter, step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from trainkit.cluster.identity import Identity
from trainkit.config.schema import RunConfig
from trainkit.data.loader import Loader
from trainkit.engine.checkpoint import load, scan
from trainkit.errors import ConfigError, DataError
from trainkit.run.building import build_model, make_optimizer
from trainkit.run.memory import abstract_model
from trainkit.run.model_facts import model_notes
from trainkit.run.plan import RunPlan, make_plan
from trainkit.run.runner import train
from trainkit.strategies.base import Ticket, Training, Update
from trainkit.strategies.forward_backward import StepWork
from trainkit.strategies.one_device import OneDevice

__all__ = ["Comparison", "Proof", "Verdict", "compare", "prove"]

Verdict = Literal["equal", "rounding", "different"]

_PRECISION: Final = "trainkit.numerics.precision.Precision"
_ONE_DEVICE: Final = "trainkit.strategies.one_device.OneDevice"
_ULPS: Final = 4096.0
"""Units in the last place that ten steps of sums in another order may cost: 9e-13 in float64, 5e-4 in float32."""
_NO_GRADIENT: Final = 1e-12
"""A gradient below this share of the model's is zero but for rounding; AdamW turns such rounding into full steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One parameter or buffer against the reference, over all steps."""

    name: str
    """`param/...` or `buffer/...`."""
    verdict: Verdict
    error: float
    """The largest relative error of any step, |a - b| / |b| in the 2-norm."""
    first_step: int | None
    """The first step after which it is not equal in every bit; for `different`, beyond rounding."""
    no_gradient: bool = False
    """Its true gradient is zero: held to 1e-8 of the sum of the learning rates instead."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One strategy against the reference."""

    label: str
    """The strategy as the user named it."""
    replicas: int
    comparisons: tuple[Comparison, ...]
    steps: tuple[int, ...] = ()
    """The updates after which they were compared: those after which its replicas are alike."""
    changes_maths: bool = False
    """Whether the strategy says of itself that it is another training."""

    @property
    def verdict(self) -> Verdict:
        """The worst of its comparisons."""
        found = {one.verdict for one in self.comparisons}
        if "different" in found:
            return "different"
        return "rounding" if "rounding" in found else "equal"

    @property
    def first(self) -> Comparison | None:
        """What differs first: the earliest step, and in it the first parameter."""
        wrong = [one for one in self.comparisons if one.verdict == "different"]
        return min(wrong, key=lambda one: one.first_step or 0, default=None)


def prove(
    candidates: Sequence[tuple[str, RunConfig]], *, steps: int, say: Callable[[str], None] = lambda _: None
) -> tuple[str, list[Proof]]:
    """Train a few steps under each candidate and on one device, and compare every parameter after every step.

    Every run has one `micro_size`, the smallest of the candidates', and float64 where the model allows.

    Args:
        candidates: (label, checked config) of each.
        steps: optimizer steps.
        say: is told what is being run.

    Returns:
        The precision that was used, and a proof for each candidate.

    Raises:
        ConfigError: a candidate cannot run here.
        TrainkitError: a candidate failed.
    """
    plans = [(label, make_plan(_for_proof(cfg, steps))) for label, cfg in candidates]
    for _, plan in plans:
        model_notes(plan, abstract_model(plan))  # what is wrong with one is told before any is trained
    finest = min((plan for _, plan in plans), key=lambda plan: plan.batch.micro_size)
    sizes = replace(finest.cfg.batch, accumulation=None)
    # One whose replicas train apart ends later, where they are alike.
    last = max(plan.last_step for _, plan in plans)
    reference = replace(
        plans[0][1].cfg, batch=sizes, stop_at_step=last, strategy={"_target_": _ONE_DEVICE, "device": "auto"}
    )
    with tempfile.TemporaryDirectory(prefix="trainkit-prove-") as folder:
        precision, expected = _reference(reference, Path(folder), say)
        reference = _with_precision(reference, precision)
        without = _without_gradient(make_plan(reference))
        proofs = []
        for place, (label, plan) in enumerate(plans):
            say(f"{label} on {plan.num_replicas} replica{'' if plan.num_replicas == 1 else 's'}")
            cfg = _with_precision(replace(plan.cfg, batch=sizes), precision)
            found = _steps_of(cfg, Path(folder) / str(place))
            allowed = 1e-8 * sum(plan.rate(step) for step in range(plan.last_step))
            comparisons = tuple(compare(expected, found, no_gradient=without, allowed=allowed))
            proofs.append(
                Proof(
                    label=label,
                    replicas=plan.num_replicas,
                    comparisons=comparisons,
                    steps=tuple(found),
                    changes_maths=plan.parts.strategy.is_another_training,
                )
            )
    return precision, proofs


def compare(
    expected: Mapping[int, Mapping[str, Tensor]],
    found: Mapping[int, Mapping[str, Tensor]],
    *,
    no_gradient: frozenset[str] = frozenset(),
    allowed: float = 0.0,
) -> Iterator[Comparison]:
    """Compare tensors by name after every step that the candidate has.

    Args:
        expected: the reference: updates -> name -> tensor.
        found: the same of the candidate.
        no_gradient: names whose true gradient is zero.
        allowed: the absolute difference those, and the buffers of a model that has some, may have.

    Example:
        >>> one, other = {"param/w": torch.ones(2)}, {"param/w": torch.ones(2) * 2}
        >>> [(item.verdict, item.first_step) for item in compare({1: one, 2: one}, {1: one, 2: other})]
        [('different', 2)]
    """
    # Batch statistics behind a parameter without gradient follow its rounding.
    loose = bool(no_gradient)
    for name in next(iter(expected.values())):
        error, unequal, beyond = 0.0, None, None
        for number, right in found.items():
            one, other = expected[number][name], right[name]
            if torch.equal(one, other):
                continue
            unequal = unequal or number
            error = max(error, _relative(one, other))
            if not _close(
                one, other, allowed if name in no_gradient or (loose and name.startswith("buffer/")) else 0.0
            ):
                beyond = beyond or number
        verdict: Verdict = "different" if beyond else "rounding" if unequal else "equal"
        yield Comparison(
            name=name,
            verdict=verdict,
            error=error,
            first_step=beyond or unequal,
            no_gradient=name in no_gradient,
        )


def _relative(expected: Tensor, found: Tensor) -> float:
    one, other = expected.double(), found.double()
    scale = float(one.norm())
    return float((one - other).norm()) / scale if scale else float((one - other).norm())


def _close(expected: Tensor, found: Tensor, allowed: float) -> bool:
    if not expected.is_floating_point() or not torch.isfinite(found).all():
        return False
    if float((expected - found).abs().max()) <= allowed:
        return True
    return _relative(expected, found) <= _ULPS * torch.finfo(expected.dtype).eps


def _for_proof(cfg: RunConfig, steps: int) -> RunConfig:
    """The config with nothing but the training: a checkpoint after every step, no one looking on."""
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


def _with_precision(cfg: RunConfig, value: str) -> RunConfig:
    return replace(cfg, precision={"_target_": _PRECISION, "value": value})


def _reference(cfg: RunConfig, folder: Path, say: Callable[[str], None]) -> tuple[str, dict[int, dict[str, Tensor]]]:
    try:
        say("reference: one_device in fp64")
        return "fp64", _steps_of(_with_precision(cfg, "fp64"), folder / "reference_fp64")
    except (ConfigError, DataError):
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        say(f"the model does not run in fp64 ({str(error).splitlines()[0]}); reference: one_device in fp32")
        return "fp32", _steps_of(_with_precision(cfg, "fp32"), folder / "reference_fp32")


def _steps_of(cfg: RunConfig, folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train, and read the weights after every step that has a checkpoint."""
    train(cfg, run_dir=folder)
    found = sorted(scan(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {one.step: _weights(load(one.folder).tensors) for one in found}


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}


def _without_gradient(plan: RunPlan) -> frozenset[str]:
    """Parameters whose gradient in the first step is zero but for rounding."""
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
