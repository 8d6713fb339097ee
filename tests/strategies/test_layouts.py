"""A gradient, slot or copy that is read by another's strides is caught here, one part at a time, to the element.

So is a tensor that crosses to a device by itself, or loses its dtype or strides on the way.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.contract.stepping import Case, Frozen, _Rank, run_rank
from tests.strategies.test_parameter_server import Net, gradients, optimizer_of
from tests.support import zoo
from tests.support.pool import Member, Pool
from tests.support.second_device import META, Remote, SecondDevice, fetch, send
from tests.support.serving import serving, state_of
from trainkit.strategies.central_storage import CentralStorage
from trainkit.strategies.collectives import GroupCollective, broadcast_values
from trainkit.strategies.core.copies import ComputingCopies
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.tensors.layouts import FlatBuffer, in_layout, make_dense
from trainkit.strategies.tensors.staging import Parcel, assembled, moved, strided_parts
from trainkit.strategies.updates.variables import VariableShards, tensors_of, variables_of

CPU = torch.device("cpu")


def test_views_of_a_vector_have_the_strides_of_their_parameters() -> None:
    params = [*zoo.channels_last().parameters(), *zoo.transposed().parameters()]
    packing = FlatBuffer.like(params, torch.float64, CPU)
    flat = packing.pack(params)
    assert [view.stride() for view in packing.views(flat)] == [param.stride() for param in params]
    for view, param in zip(packing.views(flat), params, strict=True):
        assert torch.equal(view, param)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_contiguous_gradient_reaches_the_elements_of_a_transposed_parameter(
    kind: type[torch.optim.Optimizer],
) -> None:
    gradient = torch.arange(-17.0, 18.0).reshape(5, 7)
    ends = []
    for param in (nn.Parameter(torch.ones(5, 7)), nn.Parameter(torch.ones(7, 5).t())):
        stepper = OptimizerStepper(kind([param], lr=0.1, weight_decay=0.1, fused=True), [param])  # type: ignore[call-arg]
        for step in range(3):  # the first by torch's own step, the others by the kernel
            stepper.step([gradient * (step + 1)], 1.0)
        assert stepper._kernels is not None
        ends.append(param.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=0)


def test_no_kernel_is_called_directly_while_a_slot_has_other_strides() -> None:
    param = nn.Parameter(torch.ones(7, 5).t())
    optimizer = torch.optim.AdamW([param], fused=True)
    stepper = OptimizerStepper(optimizer, [param])
    stepper.step([torch.ones(5, 7)], 1.0)
    optimizer.state[param]["exp_avg"] = torch.zeros(5, 7)
    stepper._kernels = None
    stepper._find_kernels([torch.ones(5, 7)])
    assert (stepper._kernels, optimizer.param_groups[0]["fused"]) == (None, False)


def test_dims_of_one_element_take_the_parameters_stride_without_a_copy() -> None:
    gradient = torch.rand(4, 1, 3, 3)
    laid_out = in_layout(gradient, (9, 1, 3, 1))
    assert (laid_out.stride(), laid_out.data_ptr()) == ((9, 1, 3, 1), gradient.data_ptr())


def test_what_does_not_lie_in_a_row_of_memory_is_copied_and_nothing_else() -> None:
    model = zoo.transposed()
    model.register_buffer("ones", torch.ones(1).expand(3))
    model.register_parameter("slice", nn.Parameter(torch.rand(4, 6)[:, ::2]))
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    make_dense(model)
    moved = [name for name, param in model.named_parameters() if param.data_ptr() != before[name]]
    assert moved == ["slice"]
    assert (model.get_parameter("slice").stride(), model.get_buffer("ones").stride()) == ((3, 1), (1,))


def test_rows_of_a_transposed_variable_cannot_be_cut_without_a_bit_changing() -> None:
    model = nn.Linear(16, 64, bias=False)
    whole = VariableShards(variables_of(model, torch.float32), 2)
    model.weight = nn.Parameter(torch.ones(16, 64).t())
    cut = VariableShards(variables_of(model, torch.float32), 2)
    assert (whole.roughly_split, cut.roughly_split) == ((), ("weight",))
    assert [pieces[0].strides for pieces in cut.pieces] == [(1, 32), (1, 32)]


def exchange(member: Member) -> tuple[Tensor, list[Tensor]]:
    """A tensor that lies by columns on rank 1 alone: rank 0's values, and those of both."""
    tensor = torch.arange(6.0).reshape(2, 3) + 10 * member.rank
    tensor = tensor.t().contiguous().t() if member.rank else tensor
    everyone = GroupCollective(rank=member.rank, num_ranks=2, device=CPU)
    gathered = everyone.gather(tensor)
    broadcast_values(tensor)
    small = torch.full((), member.rank + 7, dtype=torch.int16)  # gloo has no such numbers
    broadcast_values(small)
    assert small.item() == 7
    return tensor, gathered


def test_values_are_exchanged_by_element_whatever_the_strides(pool: Pool) -> None:
    expected = torch.arange(6.0).reshape(2, 3)
    for tensor, gathered in pool.run("tests.strategies.test_layouts.exchange", num_ranks=2, group=True):
        assert torch.equal(tensor, expected)
        assert torch.equal(torch.stack(gathered), torch.stack([expected, expected + 10]))


STEPS = 3
CASES = {
    "masters and statistics": Case(precision="bf16", optimizer="adamw", model={"norm": True}),
    "counted and tied": Case(task="tokens", max_norm=0.05),
    "transposed and tied": Case(task="transposed_tied"),
    "frozen": Frozen().from_a_checkpoint(),
}


def inline(_copies: ComputingCopies, compute: Any, work: Any) -> Future[Any]:
    """Compute on this thread: the second device is there for one thread alone."""
    future = Future[Any]()
    future.set_result(compute(work))
    return future


@pytest.mark.slow
@pytest.mark.parametrize("base", CASES.values(), ids=CASES)
@sdpa_kernel(SDPBackend.MATH)  # a fused one of the CPU differs by rounding, and the second device has none
def test_a_step_of_central_storage_crosses_once_a_direction(base: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(base, num_steps=STEPS, micro_size=4)
    expected = run_rank(None, base).state
    monkeypatch.setattr(ComputingCopies, "submit", inline)
    monkeypatch.setattr(CentralStorage, "_copy_devices", lambda *_: ["meta"])
    settings = {"parameter_device": "cpu"}
    with SecondDevice() as device:
        state = _Rank(None, replace(base, strategy="central_storage", settings=settings)).train().state
    assert [key for key, tensor in expected.items() if not torch.equal(tensor, state[key])] == []
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
            worker.push("w0/0", [None if grad is None else Remote(grad) for grad in grads])
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
    for before, after in zip(sent, back, strict=True):
        torch.testing.assert_close(after, before.detach(), rtol=0, atol=0)
        assert after is not None
        assert after.stride() == torch.empty_like(before).stride()


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_sparse_gradient_travels_as_indices_and_values(*, coalesced: bool) -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[3, 3, 1]]), torch.randn(3, 2), (5, 2), check_invariants=True)
    grad = grad.coalesce() if coalesced else grad
    parts = iter(strided_parts(grad))
    rebuilt = assembled(grad, parts)
    assert (rebuilt.is_coalesced(), list(parts)) == (coalesced, [])
    assert torch.equal(rebuilt.to_dense(), grad.to_dense())


def test_what_is_there_already_stays_what_it_is() -> None:
    tensors: list[Tensor | None] = [torch.ones(2), None, nn.Parameter(torch.ones(()))]
    assert all(result is tensor for result, tensor in zip(moved(tensors, CPU), tensors, strict=True))
