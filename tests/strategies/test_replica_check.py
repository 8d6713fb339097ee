"""A check of replicas that misses one changed bit, or blames the wrong rank, is caught here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.pool import Place, Pool
from tests.support.second_device import SecondDevice, send
from trainkit.strategies.collectives import GroupCollective, LocalCollective
from trainkit.strategies.core.replica import bits_hash, drifted_parameter

CPU = torch.device("cpu")


@dataclass
class Replica:
    """What the check reads of a replica."""

    model: nn.Module
    data_ranks: GroupCollective | LocalCollective
    masters_apart: bool = False


def drift(place: Place, wrong: tuple[int, ...], name: str) -> str | None:
    """What the check of a replica says, once some ranks have changed one bit of a parameter."""
    model = zoo.Net()
    if place.rank in wrong:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    collective = GroupCollective(rank=place.rank, num_ranks=place.num_ranks, device=CPU)
    return drifted_parameter(Replica(model, collective))  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "name", "said"), [
    ((), "0.weight", None), ((1,), "2.bias", "the parameter 2.bias differs on rank 1 from rank 0."),
    ((0,), "0.weight", "the parameter 0.weight differs on rank 0 from rank 1."),
    ((0, 1), "0.bias", "the parameter 0.bias differs on rank 2 from rank 0."),
])  # fmt: skip
def test_one_changed_bit_of_a_replica_is_found_and_named(wrong: Any, name: str, said: str | None, pool: Pool) -> None:
    found = pool.run("tests.strategies.test_replica_check.drift", wrong, name, num_ranks=3, group=True)
    assert found == [said] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bits_of_every_dtype_are_hashed_by_their_place(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 0, 0]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    assert int(bits_hash(one)) != int(bits_hash(other))
    assert (one.tolist(), other.tolist()) == ([1, 0, 0], [0, 1, 0])  # the bits of float64 are int64, without a copy


def test_parameters_on_two_devices_are_compared() -> None:
    model = zoo.Net()
    with SecondDevice():
        send(model.get_submodule("2"))
        assert drifted_parameter(Replica(model, LocalCollective())) is None  # type: ignore[arg-type]
