"""Each precision of conf/precision, and what keeps fp16 from overflowing.

A loss scale that reaches the clip, or an update below the rounding of bf16 that is lost without masters is caught here
alone.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import trainkit
from tests.contract.running import run, weights
from tests.contract.stepping import Case, train
from tests.contract.test_reducers import distance
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.errors import ConfigError
from trainkit.numerics.precision import LossScale, Precision, Value, converted_floats
from trainkit.strategies.core.buffers import StepBuffers

BASE = Case(global_size=16, micro_size=4, max_norm=0.2)
# unit roundoff of the products, times what ten steps with momentum make of it
TOLERANCES = {"fp64": 0.0, "fp32": 1e-5, "tf32": 1e-5, "bf16": 3e-2, "bf16_mixed": 3e-2, "fp16_mixed": 3e-3}


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
def test_a_precision_trains_as_float64_does_up_to_its_rounding(precision: str, pool: Pool) -> None:
    expected = train(pool, BASE)[0].weights
    trained = train(pool, replace(BASE, precision=precision))[0].weights
    assert distance(trained, expected) <= TOLERANCES[precision]
    assert {tensor.dtype for tensor in trained.values()} == {torch.float64 if precision == "fp64" else torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", "fp16_mixed"])
def test_low_precision_is_the_same_on_two_replicas(precision: str, pool: Pool) -> None:
    case = replace(BASE, precision=precision)
    expected = train(pool, case)[0].weights
    for rank in train(pool, replace(case, strategy="mirrored", settings={"replicas": 2})):
        assert distance(rank.weights, expected) <= 1e-5


def test_bf16_keeps_updates_smaller_than_its_rounding(pool: Pool) -> None:
    case = Case(precision="bf16", rate_scale=0.003)
    first = {name: p.detach() for name, p in case.make_model().named_parameters()}
    expected = train(pool, replace(case, precision="fp32"))[0].weights
    trained = train(pool, case)[0].weights
    # the masters begin at the weights, not at their rounding
    moved = {name: trained[name] - first[name] for name in first}
    assert distance(moved, {name: expected[name] - first[name] for name in first}) < 0.1


class Overflowing(nn.Module):
    """A model whose fp16 gradients overflow above a loss scale of 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.Net()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        outputs.register_hook(lambda grad: torch.where(grad.abs().max() > 40, torch.inf, 1.0) * grad)  # type: ignore[no-untyped-call]
        return outputs


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_overflowed_step_is_tried_again_with_the_same_samples(replicas: int, pool: Pool) -> None:
    settings = {"replicas": replicas}
    plain = Case(strategy="mirrored", settings=settings, precision="fp16_mixed", global_size=16, micro_size=4)
    expected, trained = train(pool, plain), train(pool, replace(plain, build=Overflowing))
    assert [rank.scale for rank in expected] == [65536.0] * replicas
    assert len({rank.scale for rank in trained}) == 1
    assert trained[0].scale < 65536.0
    assert [rank.samples for rank in trained] == [rank.samples for rank in expected]
    for rank in trained:
        tensors = {name.removeprefix("inner."): tensor for name, tensor in rank.weights.items()}
        assert distance(tensors, expected[0].weights) < 3e-3


def test_a_loss_scale_has_a_floor_a_memory_and_an_end() -> None:
    scaling = Precision(value="fp16_mixed", growth_interval=2, min_scale=4.0, max_overflows=5)
    scale = LossScale(scale=8.0, scaling=scaling).after(overflow=True).after(overflow=True)
    assert (scale.scale, scale.overflows) == (4.0, 2)
    again = LossScale(scale=65536.0, scaling=scaling).restored(scale.after(overflow=False).state())
    assert (again.scale, again.after(overflow=False).scale) == (4.0, 8.0)
    for _ in range(300):  # all gradients are zero
        again = again.after(overflow=False)
    assert float(torch.full((), again.scale, dtype=torch.float32)) == again.scale


def test_clipping_sees_gradients_without_their_loss_scale(pool: Pool) -> None:
    scaled = train(pool, replace(BASE, precision="fp16_mixed"))[0]
    plain = train(pool, replace(BASE, precision="fp32"))[0]
    assert scaled.norms == pytest.approx(plain.norms, rel=1e-2)


def test_only_fp16_scales_its_loss() -> None:
    scales = {name: Precision(value=name).loss_scale().scale for name in TOLERANCES}  # type: ignore[arg-type]
    assert scales == {name: 65536.0 if name == "fp16_mixed" else 1.0 for name in TOLERANCES}


@pytest.mark.parametrize("value", sorted(TOLERANCES))
def test_buffers_keep_dtype_and_bits_in_every_precision_but_are_float64_in_fp64(value: Value) -> None:
    tables = {
        "positions": torch.tensor([1001.0, 2003.0]),
        "wide": torch.tensor([1 + 2.0**-40], dtype=torch.float64),
        "narrow": torch.tensor([1001.0], dtype=torch.float16),
        "rotations": torch.tensor([1j, 1001 - 1j]),
        "words": torch.tensor([2**30 + 1]),
    }
    model = nn.Linear(1, 1)
    for name, table in tables.items():
        model.register_buffer(name, table.clone(), persistent=name != "positions")
    assert Precision(value=value).adapt(model).weight.dtype == Precision(value=value).model_dtype
    for name, table in tables.items():
        buffer = model.get_buffer(name)
        assert torch.equal(buffer.to(table.dtype), table)
        assert buffer.dtype == (torch.float64 if value == "fp64" and table.is_floating_point() else table.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(4), (5, 4)),
        (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
        (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), (2, 4)),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
    ],
)
def test_layers_of_torch_that_keep_buffers_run_in_every_dtype(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = nn.Sequential(converted_floats(make(), dtype))
    for training in (True, False):
        outputs = model.train(training)(torch.ones(shape, dtype=dtype))
        assert outputs.dtype == dtype


class Tabled(zoo.Net):
    """Scales its inputs by a float32 table, before a layer and batch normalisation."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.register_buffer("table", torch.linspace(1001, 1003, zoo.FEATURES))
        self.register_buffer("inverse", 1 / torch.linspace(1001, 1003, zoo.FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        assert torch.equal(self.get_buffer("table"), torch.linspace(1001, 1003, zoo.FEATURES))
        return super().forward(inputs * self.table * self.inverse)  # type: ignore[operator]


PLACES = [("one_device", {}), ("fsdp", {"replicas": 2}), ("parameter_server", {})]


@pytest.mark.parametrize(("strategy", "settings"), PLACES)
@pytest.mark.slow
def test_a_model_in_bf16_trains_with_float32_tables_and_batch_statistics(
    strategy: str, settings: dict[str, int], tmp_path: Path
) -> None:
    options = [f"strategy={strategy}", *(f"strategy.{key}={value}" for key, value in settings.items())]
    keys = ["data=points", "steps=3", "batch.global_size=8", "precision=bf16", "eval.every_epochs=null", "callbacks=[]"]
    result = run(tmp_path / "run", f"model={{_target_: {__name__}.Tabled}}", *keys, *options)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(exported["table"], torch.linspace(1001, 1003, zoo.FEATURES))
    assert {tensor.dtype for name, tensor in exported.items() if "tracked" not in name} == {torch.float32}
    mean = weights(result)["1.running_mean"]
    assert not torch.equal(mean, mean.bfloat16().float())  # the updates are not rounded to bfloat16
    assert torch.equal(trainkit.load(tmp_path / "run", packages=["tests"]).get_buffer("1.running_mean"), mean)


def test_a_float64_buffer_that_forward_changes_in_a_float32_run_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"mean is float64, .* Make it float32, or use precision=fp64"):
        StepBuffers(model, torch.float32).settle([1.0])


def test_a_complex_buffer_that_forward_changes_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("spectrum", torch.tensor([1j]))
    with pytest.raises(ConfigError, match=r"spectrum holds complex numbers, .* torch.view_as_real"):
        StepBuffers(model, torch.float32).settle([1.0])
