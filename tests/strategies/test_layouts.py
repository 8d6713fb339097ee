"""A gradient, slot or copy that is read by another's strides is caught here, one part at a time, to the element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.pool import Place, Pool
from trainkit.strategies.collectives import GroupCollective, broadcast_values
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.tensors.layouts import FlatBuffer, in_layout, make_dense
from trainkit.strategies.updates.variables import VariableShards, variables_of

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


def exchanged(place: Place) -> tuple[Tensor, list[Tensor]]:
    """A tensor that lies by columns on rank 1 alone: rank 0's values, and those of both."""
    own = torch.arange(6.0).reshape(2, 3) + 10 * place.rank
    own = own.t().contiguous().t() if place.rank else own
    everyone = GroupCollective(rank=place.rank, num_ranks=2, device=CPU)
    gathered = everyone.gather(own)
    broadcast_values(own)
    small = torch.full((), place.rank + 7, dtype=torch.int16)  # gloo has no such numbers
    broadcast_values(small)
    assert small.item() == 7
    return own, gathered


def test_values_are_exchanged_by_element_whatever_the_strides(pool: Pool) -> None:
    wanted = torch.arange(6.0).reshape(2, 3)
    for own, gathered in pool.run("tests.strategies.test_layouts.exchanged", num_ranks=2, group=True):
        assert torch.equal(own, wanted)
        assert torch.equal(torch.stack(gathered), torch.stack([wanted, wanted + 10]))
