"""A sum of gradients that an earlier step, or a shard without a parameter, leaks into is caught here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.running import run
from tests.support.storages import Counting
from trainkit.errors import TrainingError
from trainkit.strategies.reducers import BackendReducer
from trainkit.strategies.reducers.gradient_vector import FlatReducer, GradientVector, cut_into_buckets
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
LAYER = 64 * 64


def layers(count: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(count)))


def vector_of(params: list[nn.Parameter], bucket: int = LAYER) -> GradientVector:
    packing = FlatBuffer.like(params, torch.float32, CPU)
    buckets = cut_into_buckets(packing, bucket_bytes=bucket * 4, part_tail=False)
    return GradientVector(packing, packing.empty(), buckets)


def shard(vector: GradientVector, params: list[nn.Parameter], loss: Tensor, on_full: Any = None) -> None:
    vector.begin_backward(params, on_full)
    loss.backward()  # type: ignore[no-untyped-call]
    vector.end_backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_backward_the_gradients_are_alive_once(dtype: torch.dtype) -> None:
    model = layers(dtype=dtype)
    params, inputs = list(model.parameters()), torch.ones(1, 64, dtype=dtype)
    with Counting() as counting:
        for param in params:
            counting.see(param.untyped_storage())
        own = counting.bytes
        vector = vector_of(params)
        vector.begin_step()
        for _ in range(3):
            shard(vector, params, model(inputs).sum())
            assert counting.bytes - own == vector.flat.nbytes == 8 * LAYER * 4
    assert counting._most - own < vector.flat.nbytes + 2.5 * LAYER * dtype.itemsize, "two gradients and the activations"
    vector.close()


@pytest.mark.parametrize("bucket", [1, LAYER, 100 * LAYER])
def test_gradients_of_several_shards_have_the_bits_of_autograd(bucket: int) -> None:
    torch.manual_seed(0)
    model, inputs = layers(3), torch.randn(3, 4, 64)
    params = list(model.parameters())
    for one in inputs:
        model(one).square().sum().backward()
    expected = [param.grad for param in params]
    vector = vector_of(params, bucket)
    for _ in range(2):  # the second step finds the sums of the first in the vector
        model.zero_grad()
        vector.begin_step()
        for one in inputs:
            shard(vector, params, model(one).square().sum())
        vector.fill_rest([None] * 3)
        assert all(torch.equal(*pair) for pair in zip(vector.views, expected, strict=True))  # type: ignore[arg-type]
        assert all(param.grad is view for param, view in zip(params, vector.views, strict=True))
    vector.close()


def test_gradients_in_bfloat16_are_added_up_in_float32() -> None:
    torch.manual_seed(0)
    model, inputs = layers(2, torch.bfloat16), torch.randn(3, 4, 64, dtype=torch.bfloat16)
    params = list(model.parameters())
    expected = [torch.zeros(64, 64) for _ in params]
    for one in inputs:
        for total, grad in zip(expected, torch.autograd.grad(model(one).square().sum(), params), strict=True):
            total.add_(grad)
    vector = vector_of(params)
    vector.begin_step()
    for one in inputs:
        shard(vector, params, model(one).square().sum())
    assert all(torch.equal(*pair) for pair in zip(vector.views, expected, strict=True))
    assert all(param.grad is None for param in params)
    vector.close()


def test_a_parameter_that_a_shard_does_not_use_keeps_its_sum_and_one_without_any_gets_zeros() -> None:
    model = layers(3)
    params = list(model.parameters())
    vector = vector_of(params)
    vector.flat.fill_(7.0)  # of an earlier step
    vector.begin_step()
    shard(vector, params, params[0].sum())
    shard(vector, params, params[1].sum())
    vector.fill_rest([None] * 3)
    assert [sorted(set(view.flatten().tolist())) for view in vector.views] == [[1.0], [1.0], [0.0]]
    vector.close()


def test_a_gradient_that_something_replaces_is_the_one_that_counts() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad * 10))  # type: ignore[no-untyped-call]
    vector = vector_of([weight])
    vector.begin_step()
    shard(vector, [weight], weight.sum())
    shard(vector, [weight], weight.sum())
    assert vector.views[0].tolist() == [110.0] * 4


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    weight = nn.Parameter(torch.ones(4, 3).t())
    vector = vector_of([weight])
    vector.begin_step()
    shard(vector, [weight], (weight * torch.arange(12).view(3, 4)).sum())
    assert weight.grad is vector.views[0]
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, torch.arange(12).view(3, 4).float())


def test_new_gradients_of_the_last_pass_are_copied_together_with_the_buffers() -> None:
    weight = nn.Parameter(torch.ones(4))
    packing = FlatBuffer([torch.Size([4]), torch.Size([1])], torch.float32, CPU, num_grads=1)
    vector = GradientVector(packing, packing.empty(), cut_into_buckets(packing, bucket_bytes=0, part_tail=False))
    for shards in (1, 2):
        vector.begin_step()
        for number in range(shards):
            vector.begin_backward([weight], is_last=number == shards - 1)
            weight.sum().backward()  # type: ignore[no-untyped-call]
            vector.end_backward()
        assert (weight.grad is vector.views[0]) == (shards == 2), "the gradient of a single pass is copied once, later"
        vector.fill_rest([weight.grad, torch.full((1,), 9.0)])
        assert vector.flat.tolist() == [float(shards)] * 4 + [9.0]
        weight.grad = None


class InPlace(FlatReducer):
    """A reducer of one rank."""

    def sum(self, flat: Tensor) -> None:
        flat.mul_(2.0)


def test_an_interrupted_step_leaves_nothing_for_the_next() -> None:
    model, reducer = layers(2), InPlace()
    params = list(model.parameters())
    packing = FlatBuffer.like(params, torch.float32, CPU)

    def partials(*, fails: bool) -> Any:
        for _ in range(2):
            reducer.begin_backward(params, is_last=False)
            sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
            if fails:
                raise TrainingError("interrupted")
            reducer.end_backward()
        yield 0, [param.grad for param in params]

    with pytest.raises(TrainingError):
        reducer.reduce(partials(fails=True), num_shards=2, packing=packing)
    model.zero_grad()  # as `Replica.recover` does
    found = reducer.reduce(partials(fails=False), num_shards=2, packing=packing)
    assert [sorted(set(one.flatten().tolist())) for one in found if one is not None] == [[4.0], [4.0]]


SIGNS = {"exchange": "x", "first layer": "0", "layer": ".", "end": "|"}
DEEP = (
    "recipe=digits", f"model.hidden={[8] * 13}", "steps=2", "eval.every_epochs=null", "precision=bf16", "quiet=true",
    "strategy=mirrored", "strategy.replicas=1", "strategy.process_group=always", f"strategy.bucket_mb={200 / 2**20}",
    "objective.ignore_index=null",  # a counted weight is one more exchange, at the end
)  # fmt: skip


@pytest.mark.parametrize("more", [(), ("strategy.compression=bf16", "batch.micro_size=16")], ids=["", "compressed"])
def test_thirteen_of_fourteen_exchanges_begin_while_backward_computes(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    launch, arrive, end = BackendReducer._launch, GradientVector._on_gradient, BackendReducer.end_backward

    def launched(self: Any, vector: Any, bucket: Any) -> None:
        events.append("exchange")
        launch(self, vector, bucket)

    def arrived(self: Any, place: int, param: Tensor) -> None:
        events.append("first layer" if place < 2 else "layer")  # its bias may come first, or its weight
        arrive(self, place, param)

    def ended(self: Any) -> None:
        end(self)
        events.append("end")

    monkeypatch.setattr(BackendReducer, "_launch", launched)
    monkeypatch.setattr(GradientVector, "_on_gradient", arrived)
    monkeypatch.setattr(BackendReducer, "end_backward", ended)
    run(tmp_path, *DEEP, *more)
    last = "".join(map(SIGNS.__getitem__, events)).rstrip("|").rpartition("|")[2]  # the last pass of the last step
    assert last.count("x") == 14
    assert last.endswith("0x")
    assert last.count("x", 0, last.index("0")) == 13
