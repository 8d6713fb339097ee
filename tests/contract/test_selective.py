"""Recomputing cheap operations alone, or keeping a share of the activations: what backward holds, never the numbers.

A result that is kept although it was overwritten, or batch statistics that a recomputation counts again is caught here
alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tests.contract.stepping import Case, train
from tests.contract.test_shaping import EAGERLY, TOKENS, gpt
from tests.support.pool import Pool
from tests.support.storages import Counting
from trainkit.errors import TrainkitError
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms, shaping_problems
from trainkit.strategies.model_transforms.recomputing import selective_contexts

SELECTIVE = ModelTransforms(recompute="selective")


def alive_after_forward(shaping: ModelTransforms) -> int:
    model = apply_transforms(gpt(), shaping)
    with Counting() as counting:
        outputs = model(TOKENS)
        gc.collect()
        held = counting.bytes
    del outputs
    return held


@pytest.mark.slow
def test_selective_keeps_less_than_none_and_more_than_full() -> None:
    none, selective, full = (
        alive_after_forward(ModelTransforms(recompute=one)) for one in ("none", "selective", "full")
    )
    assert full < selective < none
    assert none - selective > 3 * 5 * 2 * 8 * 8 * 4  # of each of three blocks: norms, activations and their kin


class Bending(nn.Module):
    """Changes the result of a matrix product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        bent: Tensor = self.linear(inputs).mul_(3).sigmoid()
        return bent


def gradients(block: nn.Module, *, autocast: bool = False, apart: bool = False, selective: bool = True) -> list[Tensor]:
    """Of a block that is applied twice, by one backward pass or by two: for the inputs, and for the weights."""
    inputs = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    hidden, params = inputs, list(block.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            hidden = (
                checkpoint(block, hidden, use_reentrant=False, context_fn=selective_contexts)
                if selective
                else block(hidden)
            )
    total = hidden.sum()
    if apart:
        return [*torch.autograd.grad(total, inputs, retain_graph=True), *torch.autograd.grad(total, params)]
    return list(torch.autograd.grad(total, [inputs, *params]))


@pytest.mark.parametrize("settings", [{}, {"autocast": True}, {"apart": True}], ids=["once", "autocast", "apart"])
@pytest.mark.parametrize("make", [Bending, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])
def test_in_place_changes_cached_casts_and_split_backward_passes_keep_the_bits(
    make: Callable[[], nn.Module], settings: dict[str, bool]
) -> None:
    block = make()
    expected, found = gradients(block, **settings, selective=False), gradients(block, **settings)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products with a bias."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_a_kept_result_is_not_computed_again() -> None:
    block, counts = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), []
    for contexts in (noop_context_fn, selective_contexts):
        with Products() as products:  # type: ignore[no-untyped-call]
            out = checkpoint(block, torch.ones(1, 4, requires_grad=True), use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        counts.append(products.count)
    assert counts == [4, 2]


class Fickle(nn.Module):
    """Multiplies by another operation when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.eye(4)), [0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls[0] += 1
        product = inputs @ self.weight if self.calls[0] == 1 else torch.addmm(torch.zeros(4), inputs, self.weight)
        return product.tanh()


def test_a_block_that_multiplies_otherwise_the_second_time_is_an_error() -> None:
    inputs = torch.ones(1, 4, requires_grad=True)
    found = checkpoint(Fickle(), inputs, use_reentrant=False, context_fn=selective_contexts)
    with pytest.raises(TrainkitError, match="different matrix products when it is recomputed"):
        found.sum().backward()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "one_device"},
        {"strategy": "mirrored", "settings": {"replicas": 2}},
        {"strategy": "fsdp", "settings": {"replicas": 2}},
        pytest.param({"strategy": "pipeline", "settings": {"stages": 2, "schedule": "zero_bubble"}},
                     marks=pytest.mark.slow),
        pytest.param({"strategy": "tensor_parallel", "settings": {"degree": 2}}, marks=pytest.mark.slow),
    ],
    ids=["one_device", "mirrored", "fsdp", "zero_bubble", "tensor_parallel"],
)  # fmt: skip
def test_weights_have_the_bits_of_a_training_that_keeps_all(settings: dict[str, Any], pool: Pool) -> None:
    case = replace(Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3), **settings)
    plain, spared = train(pool, case), train(pool, replace(case, shaping=SELECTIVE))
    for one, other in zip(plain, spared, strict=True):
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_what_a_compiler_chooses_is_not_chosen_twice() -> None:
    (problem,) = shaping_problems(gpt(), replace(SELECTIVE, **EAGERLY), compiles="model", strategy="mine")
    assert str(problem) == (
        "activation_checkpointing=selective: does not work with compile.mode=default: the compiler chooses the tensors "
        "that a compiled block keeps. Use full."
    )
