"""A pass of a plan on tensors without data, and the batches of a run.

Fake tensors have shapes, dtypes and devices, and no data: the pass needs neither the memory nor the time of a real one.
The kernels are those of the CPU, whose autograd formulas save the same tensors as those of other devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map

from trainkit.data.splits import size_of, test_splits, validation_splits
from trainkit.numerics.copies import computed_tensors
from trainkit.numerics.generators import Untouched
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.run.planning.build import model_transforms_of
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.model_transforms import apply_transforms
from trainkit.trained.build import frozen_models


class NoSampleError(Exception):
    """No sample of the data is known."""


def example_batch(plan: RunPlan, size: int | None = None) -> Any:
    """Return a batch, made of one repeated sample.

    Args:
        plan: the run.
        size: the number of samples; None: that of the largest shard.

    Raises:
        NoSampleError: no sample of the training data is known.
    """
    sample = plan.components.sample
    if sample is None:
        raise NoSampleError("no sample of the data is known")
    size = plan.batch.shard_size(0, 0) if size is None else size
    with Untouched(seed=0):
        return plan.components.hooks.collate_function([sample] * size, list(range(size)))


def batch_bytes(plan: RunPlan) -> int:
    """Return the bytes of the batch of the largest shard."""
    leaves = tree_iter(example_batch(plan))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def evaluated_samples(plan: RunPlan) -> int:
    """Return the samples of the largest batch of an evaluation; 0 if the run evaluates nothing."""
    datasets = plan.components.datasets
    names = [] if plan.is_measurement else [*validation_splits(datasets), *test_splits(datasets)]
    return max((min(size_of(datasets[name]), plan.eval_batch_size) for name in names), default=0)


def own_copy(objective: Objective) -> Objective:
    """Return a copy whose state a pass without data may change; frozen models are shared."""
    return copy.deepcopy(objective, {id(model): model for _, model in frozen_models(objective)})


def without_data(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """Return a copy of a model whose tensors have no data, and whose gradients are dense: a sparse one has no size."""
    tensors = [*model.parameters(), *model.buffers(), *computed_tensors(model)]
    fake = copy.deepcopy(model, {id(tensor): fake_of(tensor, fakes) for tensor in tensors})
    for module in fake.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return fake


def fake_of(tensor: Tensor, fakes: FakeTensorMode) -> Tensor:
    """Return a tensor of the CPU without data, with the shape and strides of another."""
    with fakes:
        if tensor.layout is torch.strided and tensor.is_contiguous():
            # cached by the mode, unlike empty_like of a tensor of another device: two fifths of a ResNet-50's pass
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            fake = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def taking_data() -> AbstractContextManager[Any]:
    """Return a context in which modules convert tensors without data: they refuse to set `data` of fake ones."""
    return mock.patch.object(torch.utils, "swap_tensors", _take_data)


def _take_data(param: Tensor, converted: Tensor) -> None:
    param.data = converted.data


def dry_pass(
    plan: RunPlan,
    model: nn.Module,
    *,
    beside: AbstractContextManager[object] | None = None,
    loss: Callable[[Model, Any], Loss] | None = None,
    after_forward: Callable[[], None] | None = None,
) -> None:
    """Run forward and backward of the largest shard on a whole model without data, for each phase of the objective.

    Args:
        plan: the run.
        model: the model, with or without data; unchanged.
        beside: context manager around the pass, such as a counter of its operations.
        loss: computes the loss of a batch; None: the objective.
        after_forward: called between forward and backward.

    Raises:
        Exception: the model or the objective reads the data of a tensor, or fails for another reason.
    """
    precision, objective, batch = plan.components.precision, own_copy(plan.components.objective), example_batch(plan)
    losses: Sequence[Callable[[Model, Any], Loss]] = [
        partial(objective.phase_loss, phase) for phase in objective.phases
    ] or [objective.loss]
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake = without_data(model, fakes)
    with taking_data():
        precision.adapt(fake)
    apply_transforms(fake, replace(model_transforms_of(plan.cfg), compile_mode="off"))
    with fakes, Untouched(seed=0), torch.enable_grad():
        inputs = tree_map(lambda leaf: fake_of(leaf, fakes) if isinstance(leaf, Tensor) else leaf, batch)
        for compute in losses if loss is None else [loss]:
            with beside or nullcontext():
                with precision.autocast(["cpu"]):
                    result = compute(fake, inputs)
                if after_forward is not None:
                    after_forward()
                torch.autograd.backward(result.total)
