"""A model that draws numbers that no seed controls begins alike on every rank that holds the same part of it.

A rank that begins with weights of its own, since a constructor drew what no seed controls is caught here alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.stepping import Case, _Rank
from tests.support.pool import Place, Pool
from tests.support.zoo import Net
from trainkit.strategies.tensors.layouts import local_part

PLAN = {"0": "colwise", "2": "rowwise"}


class Unseeded(Net):
    """Draws all parameters and two buffers anew in each process; one of them is not saved."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("table", torch.zeros(3, dtype=torch.complex64), persistent=False)
        generator = torch.Generator()
        generator.seed()
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.rand(tensor.shape, generator=generator))


def tensors_of(place: Place, case: Case) -> dict[str, Tensor]:
    """The tensors of a rank before the first step; those of sharded parameters are its parts."""
    executor = _Rank(place, case).setup(0)
    model = executor.local.model
    found = {
        name: local_part(one).detach().clone()
        for name, one in [*model.named_parameters(), *model.named_buffers()]
        if not one.is_meta
    }
    executor.close()
    return found


CASES: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("mirrored", {"replicas": 2}, [(0, 1)]),
    ("local_sgd", {"replicas": 2}, [(0, 1)]),
    ("fsdp", {"replicas": 2}, []),
    ("tensor_parallel", {"degree": 2, "replicas": 2, "plan": PLAN}, [(0, 2), (1, 3)]),
    ("mesh", {"shard": 2, "tensor": 2, "plan": PLAN}, []),
    ("mesh", {"replicate": 2, "shard": 2, "plan": "auto"}, [(0, 2), (1, 3)]),
    ("pipeline", {"stages": 2, "replicas": 2}, [(0, 2), (1, 3)]),
]
"""Strategy, settings, and the ranks that hold the same parts of all parameters."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("strategy", "settings", "alike"), CASES)
def test_ranks_begin_with_the_same_numbers(
    strategy: str, settings: dict[str, Any], alike: list[tuple[int, ...]], precision: str, pool: Pool
) -> None:
    case = Case(build=Unseeded, strategy=strategy, settings=settings, precision=precision)
    sizes = [settings.get(axis, 1) for axis in ("replicas", "degree", "replicate", "shard", "tensor", "stages")]
    ranks = pool.run(f"{__name__}.tensors_of", case, num_ranks=math.prod(sizes))
    for found in ranks[1:]:
        assert torch.equal(found["saved"], ranks[0]["saved"])
        assert torch.equal(found["table"], ranks[0]["table"])
    for one, other in alike:
        torch.testing.assert_close(ranks[one], ranks[other], rtol=0, atol=0)
    if settings.keys() & {"degree", "tensor"}:  # the second bias is whole along this axis: ranks 0 and 1, 2 and 3
        assert torch.equal(ranks[0]["2.bias"], ranks[1]["2.bias"])
        assert torch.equal(ranks[2]["2.bias"], ranks[3]["2.bias"])
