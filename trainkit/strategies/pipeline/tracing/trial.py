"""Record what a model computes with a sample, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.data.reading.collate import collate
from trainkit.errors import Problem
from trainkit.objectives.base import Supervised
from trainkit.objectives.fields import split_batch
from trainkit.strategies.base import PlanContext
from trainkit.strategies.pipeline.stage_assignment import blocks_to_cut
from trainkit.strategies.pipeline.tracing.program import Program
from trainkit.strategies.pipeline.tracing.python_state import CannotCut

_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, tuple[Program, ...] | list[Problem]]] = WeakKeyDictionary()


def programs_of(model: nn.Module, context: PlanContext) -> tuple[Program, ...] | list[Problem]:
    """Return what a model computes with two samples in training, and then in evaluation; or why it cannot be cut.

    Args:
        model: may be on the meta device.
        context: has one sample of the training data; without one, nothing is known, and the result is empty.
    """
    sample = context.sample
    if sample is None:
        return ()
    known = _KNOWN.get(model)
    if known is None or known[0] is not sample:
        _KNOWN[model] = known = sample, _tried(model, _inputs(context))
    return known[1]


def _inputs(context: PlanContext) -> Any:
    """Return the inputs of a batch that holds the sample twice."""
    batch = collate([context.sample, context.sample], [0, 0])
    objective = context.objective
    return (objective.split_batch(batch) if isinstance(objective, Supervised) else split_batch(batch))[0]


def _tried(model: nn.Module, given: Any) -> tuple[Program, ...] | list[Problem]:
    from trainkit.strategies.pipeline.tracing.trace import trace  # noqa: PLC0415 - heavy

    # The model here is in float32, whatever the run's precision.
    inputs = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        given,
    )
    units, device = blocks_to_cut(model), torch.device("cpu")
    try:
        training = trace(model, units, inputs, device=device, autocast=nullcontext())
        with _evaluating(model):
            evaluating = trace(model, units, inputs, device=device, autocast=nullcontext(), grad=False)
    except CannotCut as error:
        return [Problem(key="model", rule=f"cannot be cut into stages: {error}. {error.remedy}")]
    return training, evaluating


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was.items():  # parents before their children, which may differ
            module.train(training)
