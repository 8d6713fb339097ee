"""Setting a strategy up in a test that trains no step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainkit.numerics.batch import BatchPlan
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import Data, LossWeighting, Numerics, SetupRequest, StepContext, UpdateParams


def request_for(model: nn.Module, **fields: Any) -> SetupRequest:
    """A request with a training that nobody runs; `fields` are its other fields."""
    training = StepContext(
        plan=BatchPlan(num_samples=8, global_size=8, micro_size=8),
        objective=Classification(),
        weighing=LossWeighting(per_sample=1.0, planned=1.0),
        rule=lambda _version: UpdateParams(lr_factor=1.0, max_norm=None),
    )
    defaults = {"numerics": Numerics(), "training": training, "open_data": _no_data}
    return SetupRequest(model=model, **{**defaults, **fields})


def _no_data(device: torch.device) -> Data:
    raise AssertionError(f"no data for {device}")
