"""The probe: a short training under plain SGD, whose checkpoints give the gradient of every step by name.

SGD with momentum m keeps `b' = m b + g` for each parameter, and every strategy saves the optimizer state under the
canonical name of the parameter. So `g = b' - m b` is the gradient that the optimizer received, under every strategy,
without recording anything during a step. Without momentum, `g = (p - p') / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis.evidence import Expected, Tensors
from trainkit.trainer.checkpoint import list_complete, load

MOMENTUM: Final = 2.0**-10
"""Small, so that the subtracted part is small; a power of two, so that the product is exact."""
_MOVE: Final = 0.01
"""The fraction of the parameters' norm by which the first step of a probe moves them."""


def probe_rate(expected: Expected, params: Iterable[Tensor]) -> float:
    """Return the probe's learning rate: a power of two that moves the parameters by a hundredth in the first step."""
    gradient = math.hypot(*(float(grad.norm()) for grad in expected.gradient.values()))
    size = math.hypot(*(float(param.detach().norm()) for param in params))
    if not (gradient > 0 and size > 0 and math.isfinite(gradient)):
        return 1.0
    return float(2.0 ** math.floor(math.log2(_MOVE * size / gradient)))


def probe_config(cfg: RunConfig, *, rate: float, momentum: float = MOMENTUM) -> RunConfig:
    """Return the config with plain SGD at a constant rate: no decay, clipping, warmup or schedule."""
    fused = {"fused": True} if cfg.optimizer.get("fused") else {}
    optimizer = {"_target_": "torch.optim.SGD", "lr": rate, "momentum": momentum, **fused}
    return replace(
        cfg,
        optimizer=optimizer,
        schedule={"_target_": "trainkit.numerics.schedules.Constant"},
        clip=replace(cfg.clip, max_norm=None),
        warmup=replace(cfg.warmup, steps=None, epochs=None),
        lr_scaling=replace(cfg.lr_scaling, reference_batch=None),
    )


def transitions(
    folder: Path, initial: Mapping[str, Tensor]
) -> Iterator[tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Yield (step, tensors before it, tensors after it) of every step between two checkpoints of a run."""
    before, updates = initial, 0
    for checkpoint in sorted(list_complete(folder / "checkpoints"), key=lambda one: one.step):
        after = load(checkpoint.folder).tensors
        if checkpoint.step == updates + 1:
            yield updates, before, after
        before, updates = after, checkpoint.step


def gradient_between(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str], *, rate: float
) -> Tensors:
    """Return the gradient that the optimizer of a probe received between two checkpoints.

    Example:
        >>> one = {"param/w": torch.tensor([1.0])}
        >>> other = {"param/w": torch.tensor([0.5]), "optimizer/momentum_buffer/w": torch.tensor([2.0])}
        >>> gradient_between(one, other, ["w"], rate=0.25)["w"].tolist()
        [2.0]
        >>> gradient_between(one, {"param/w": torch.tensor([0.5])}, ["w"], rate=0.25)["w"].tolist()
        [2.0]
    """
    keeps = any(key.startswith("optimizer/momentum_buffer/") for key in after)
    found: dict[str, Tensor] = {}
    for name in names:
        slot = f"optimizer/momentum_buffer/{name}"
        if slot in after:
            now = after[slot]
            found[name] = now - MOMENTUM * before[slot] if slot in before else now
        elif keeps:  # a parameter without a gradient has no slot
            found[name] = torch.zeros_like(after[f"param/{name}"])
        else:
            found[name] = (before[f"param/{name}"] - after[f"param/{name}"]) / rate
    return found
