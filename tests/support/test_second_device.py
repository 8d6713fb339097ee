"""The second device computes as the first, and with it not at all."""

import pytest
import torch
from torch import nn

from tests.support.second_device import SecondDevice, There, fetch, send


def test_numbers_pass_between_the_devices_and_back() -> None:
    layer, x = nn.Linear(3, 2), torch.arange(6.0).reshape(2, 3)
    expected = layer(x)
    expected.sum().backward()
    grad = layer.weight.grad
    assert grad is not None
    layer.zero_grad()
    with SecondDevice():
        send(layer)
        found = layer(x.to("meta")).to("cpu")
        found.sum().backward()
    assert torch.equal(found, expected)
    there = layer.weight.grad
    assert isinstance(there, There)
    assert torch.equal(fetch(there), grad)


def test_tensors_of_two_devices_do_not_meet() -> None:
    with SecondDevice():
        here = torch.ones(2)
        there = here.to("meta")
        with pytest.raises(AssertionError, match="add got tensors of two devices"):
            here + there
        with pytest.raises(AssertionError, match="_foreach_mul_ got tensors of two devices"):
            torch._foreach_mul_([here, there], torch.ones(()))
