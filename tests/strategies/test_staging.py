"""A tensor that crosses to a device by itself, or loses its dtype or strides on the way, is caught here alone."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.contract.stepping import Case, Frozen, _Rank, run_rank
from tests.strategies.test_parameter_store import Net, gradients, optimizer_of
from tests.support import zoo
from tests.support.second_device import META, SecondDevice, There, fetch, send
from tests.support.serving import serving, state_of
from trainkit.strategies.central_storage import CentralStorage
from trainkit.strategies.core.copies import ComputingCopies
from trainkit.strategies.tensors.staging import Parcel, assembled, moved, strided_parts
from trainkit.strategies.updates.variables import tensors_of

CPU = torch.device("cpu")
STEPS = 3
CASES = {
    "masters and statistics": Case(precision="bf16", optimizer="adamw", model={"norm": True}),
    "counted and tied": Case(task="tokens", max_norm=0.05),
    "transposed and tied": Case(task="transposed_tied"),
    "frozen": Frozen().from_a_checkpoint(),
}


def inline(_copies: ComputingCopies, compute: Any, work: Any) -> Future[Any]:
    """Compute on this thread: the second device is there for one thread alone."""
    done = Future[Any]()
    done.set_result(compute(work))
    return done


@pytest.mark.parametrize("base", CASES.values(), ids=CASES)
@sdpa_kernel(SDPBackend.MATH)  # a fused one of the CPU differs by rounding, and the second device has none
def test_a_step_of_central_storage_crosses_once_a_direction(base: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(base, num_steps=STEPS, micro_size=4)
    expected = run_rank(None, base).state
    monkeypatch.setattr(ComputingCopies, "submit", inline)
    monkeypatch.setattr(CentralStorage, "_computing", lambda *_: ["meta"])
    settings = {"parameter_device": "cpu"}
    with SecondDevice() as device:
        found = _Rank(None, replace(base, strategy="central_storage", settings=settings)).train().state
    assert [key for key, tensor in expected.items() if not torch.equal(tensor, found[key])] == []
    vectors = [dtype for dtype in device.crossed if dtype is torch.uint8]
    assert len(vectors) == 2 * STEPS + (base.start is not None)  # a checkpoint is one more


def test_a_pull_and_a_push_of_a_worker_cross_once_each() -> None:
    model = Net()
    expected, grads = state_of(model), gradients(model, 1, missing=(1,))
    with serving(model, optimizer_of("sgd")) as farm:
        worker = farm.client()
        with SecondDevice() as device:
            send(model)
            for param in model.parameters():
                param.data.zero_()
            worker.pull(tensors_of(model))
            worker.push("w0/0", [None if one is None else There(one) for one in grads])
        assert device.crossed == [torch.uint8, torch.uint8]
        farm.chief.apply(version=1, lr_factor=1.0, keys=["w0/0"])
        updated = farm.chief.state()
        worker.close()
    assert [key for key, tensor in state_of(model).items() if not torch.equal(fetch(tensor), expected[key])] == []
    assert grads[0] is not None
    step = expected["param/large.weight"] - updated["param/large.weight"]
    torch.testing.assert_close(step, 0.1 * grads[0], rtol=0, atol=1e-6)


def test_tensors_arrive_with_their_dtypes_strides_and_sizes() -> None:
    sent: list[Tensor] = [*zoo.channels_last().parameters(), torch.empty(0, 3), torch.tensor(7)]
    sent += [
        torch.randn(5).bfloat16(),
        torch.randn(6, 4)[:, ::2],
        torch.tensor([True]),
        torch.randn(3, dtype=torch.cfloat),
    ]
    with SecondDevice() as device:
        there = Parcel(sent, towards=META).on(META)
        back = moved([*there[:2], None, *there[2:]], CPU)
    assert len(device.crossed) == 2
    assert back.pop(2) is None
    for one, other in zip(sent, back, strict=True):
        torch.testing.assert_close(other, one.detach(), rtol=0, atol=0)
        assert other is not None
        assert other.stride() == torch.empty_like(one).stride()


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_sparse_gradient_travels_as_indices_and_values(*, coalesced: bool) -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[3, 3, 1]]), torch.randn(3, 2), (5, 2), check_invariants=True)
    grad = grad.coalesce() if coalesced else grad
    parts = iter(strided_parts(grad))
    found = assembled(grad, parts)
    assert (found.is_coalesced(), list(parts)) == (coalesced, [])
    assert torch.equal(found.to_dense(), grad.to_dense())


def test_what_is_there_already_stays_what_it_is() -> None:
    tensors: list[Tensor | None] = [torch.ones(2), None, nn.Parameter(torch.ones(()))]
    assert all(one is other for one, other in zip(moved(tensors, CPU), tensors, strict=True))
