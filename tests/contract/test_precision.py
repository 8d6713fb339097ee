"""Each precision of conf/precision, and what keeps fp16 from overflowing."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tests.contract.stepping import CONF, Case, train
from tests.support.pool import Pool
from trainkit.errors import ConfigError
from trainkit.numerics.precision import LossScale, Precision, Scaling
from trainkit.strategies.core.buffers import StepBuffers

BASE = Case(global_size=16, micro_size=4, max_norm=0.2)
# unit roundoff of the products, times what ten steps with momentum make of it
TOLERANCES = {"fp64": 0.0, "fp32": 1e-5, "tf32": 1e-5, "bf16": 3e-2, "bf16_mixed": 3e-2, "fp16_mixed": 3e-3}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((a[name].double() - b[name].double()).norm() / b[name].double().norm()) for name in b)


def test_every_choice_of_precision_is_tried_here() -> None:
    assert sorted(path.stem for path in (CONF / "precision").glob("*.yaml")) == sorted(TOLERANCES)


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

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        outputs.register_hook(lambda grad: torch.where(grad.abs().max() > 40, torch.inf, 1.0) * grad)  # type: ignore[no-untyped-call]
        return outputs


class OverflowingCase(Case):
    def make_model(self) -> nn.Module:
        return Overflowing(super().make_model())


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_overflowed_step_is_tried_again_with_the_same_samples(replicas: int, pool: Pool) -> None:
    settings = {"replicas": replicas}
    plain = Case(strategy="mirrored", settings=settings, precision="fp16_mixed", global_size=16, micro_size=4)
    case = OverflowingCase(**vars(plain))
    expected, trained = train(pool, plain), train(pool, case)
    assert [rank.scale for rank in expected] == [65536.0] * replicas
    assert len({rank.scale for rank in trained}) == 1
    assert trained[0].scale < 65536.0
    assert [rank.samples for rank in trained] == [rank.samples for rank in expected]
    for rank in trained:
        assert (
            distance({name.removeprefix("inner."): t for name, t in rank.weights.items()}, expected[0].weights) < 3e-3
        )


def test_a_loss_scale_has_a_floor_a_memory_and_an_end() -> None:
    scaling = Scaling(growth_interval=2, min_scale=4.0, max_overflows=5)
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


@pytest.mark.parametrize("value", ["fp64", "fp32", "bf16"])
def test_complex_buffers_keep_their_imaginary_part(value: Literal["fp64", "fp32", "bf16"]) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("rotations", torch.tensor([1j, 1 - 1j]))
    assert Precision(value=value).adapt(model).get_buffer("rotations").tolist() == [1j, 1 - 1j]
    assert model.weight.dtype == Precision(value=value).model_dtype


def test_a_complex_buffer_that_forward_changes_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("spectrum", torch.tensor([1j]))
    with pytest.raises(ConfigError, match=r"spectrum holds complex numbers, .* torch.view_as_real"):
        StepBuffers(model, torch.float32).settle([1.0])
