"""What a training may have, on meshes of three and four axes: how far each is from one device, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.contract.checks import alone
from tests.contract.stepping import OPTIMIZERS, Case, oracle, train
from tests.contract.test_mesh import FROZEN, STAGED, STAGED_NET, EvenPoints
from tests.support.pool import Pool
from trainkit.adapters.average import Ema
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.model_transforms import ModelTransforms


def averaged(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with averages of the weights."""
    optimizer = OPTIMIZERS["adamw"](params)
    Ema(decay=0.7).attach(optimizer)
    return optimizer


OPTIMIZERS["averaged"] = averaged


class Feature(Case):
    """A training whose processes import this module, and with it the optimizer."""


GPT: Final = Feature(**{**vars(STAGED), "num_steps": 4})
"""Embedding and head are tied, sentences are padded with targets that are ignored, gradients are clipped."""
NET: Final = replace(STAGED_NET, samples=EvenPoints, max_norm=0.05)
FEATURES: Final[Mapping[str, Case]] = {
    "clip, tied, ignored targets": GPT,
    "accumulated": replace(GPT, global_size=16, micro_size=1),
    "ragged": replace(GPT, global_size=10, micro_size=3),
    "idle ranks": replace(GPT, global_size=4, micro_size=4),
    "recomputed": replace(GPT, shaping=ModelTransforms(recompute="full")),
    "summed last": replace(GPT, global_size=16, settings={"sync": "last"}),
    "resumed": replace(GPT, resume_at=2),
    "frozen, resumed": replace(FROZEN, micro_size=2, resume_at=2),
    "average, resumed": replace(GPT, optimizer="averaged", resume_at=2),
    "masters (bf16), resumed": replace(GPT, optimizer="sgd", precision="bf16", resume_at=2),
    "bf16_mixed": replace(GPT, optimizer="sgd", precision="bf16_mixed"),
    "fp16_mixed": replace(GPT, optimizer="sgd", precision="fp16_mixed", rate_scale=0.1),
    "fp32": replace(GPT, optimizer="sgd", precision="fp32"),
    "hidden states to the loss": replace(GPT, task="hidden"),
    "dropout": replace(GPT, model={"bias": False, "dropout": 0.3}, num_steps=2),
    "BatchNorm": replace(NET, settings={"plan": {"3": "rowwise_scattered"}}),
    "reproducible": replace(GPT, optimizer="adamw_loop", precision="fp32", reproducible=True),
}
"""Name -> a training on a mesh whose axes are not given."""
AXES: Final[Mapping[str, dict[str, Any]]] = {
    "pipe x shard x tensor": {"pipe": 2, "shard": 2, "tensor": 2},
    "replicate x shard x context": {"replicate": 2, "shard": 2, "context": 2},
    "pipe x shard x context x tensor": {"pipe": 2, "shard": 2, "context": 2, "tensor": 2},
}
"""Name -> axes of 8 ranks and of 16."""
CLOSE: Final = {"fp64": 1e-12, "fp32": 3e-6, "bf16": 0.05, "bf16_mixed": 0.05, "fp16_mixed": 0.05}
"""Precision -> the largest error."""


def tensors_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters, the buffers and the averages of a state."""
    prefixes = ("param/", "buffer/", "optimizer/average/")
    return {key: tensor.double() for key, tensor in state.items() if key.startswith(prefixes)}


@cache
def expected_of(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Return the tensors and losses of a training: of the plain loop in fp64, of one device where that has no loop."""
    case = replace(FEATURES[name], settings={})
    training = alone(case)
    state, losses = tensors_of(training.state), training.losses
    if case.precision == "fp64" and "dropout" not in case.model:
        plain = oracle(replace(case, optimizer="adamw" if case.optimizer == "averaged" else case.optimizer))
        state |= {f"param/{key}": param.detach().double() for key, param in plain.model.named_parameters()}
        losses = plain.losses
    return state, losses


def refusals(case: Case) -> Iterator[str]:
    """Yield what the strategy says of a training that it does not take, as `plan` says it."""
    strategy = case.make_strategy()
    numerics = Numerics(reproducible=case.reproducible)
    context = PlanContext(objective=None if case.task == "classes" else LanguageModelling(), numerics=numerics)
    yield from map(str, strategy.validate(context) or strategy.validate_model(case.make_model().to("meta"), context))


def error_of(pool: Pool, axes: str, name: str) -> tuple[float | None, str]:
    """Return the largest relative error of a training, or None and why it is refused.

    The error is that of a parameter, a buffer or an average after the last step, or of the loss of a step, on any rank.
    """
    base = FEATURES[name]
    settings = {key: value for key, value in base.settings.items() if key != "plan" or "tensor" in AXES[axes]}
    case = replace(base, settings={**AXES[axes], **settings})
    if problems := list(refusals(case)):
        return None, problems[0].replace("\n", " ")
    state, losses = expected_of(name)
    ranks = train(pool, case)
    errors = [abs(loss / other - 1) for rank in ranks for loss, other in zip(rank.losses, losses, strict=True)]
    for rank in ranks:
        tensors = tensors_of(rank.state)
        assert tensors.keys() == state.keys(), tensors.keys() ^ state.keys()
        errors += [float((tensors[key] - value).norm() / value.norm().clamp(min=1e-30)) for key, value in state.items()]
    return max(errors), ""
