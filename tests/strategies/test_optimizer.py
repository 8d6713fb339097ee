"""A direct call of a kernel that ignores a changed setting, a hook or a parameter left out is caught here alone.

Updates of a step: whether they are by_function, and how often gradients are walked for that.

So is an optimizer that needs whole parameters, has a harmless name and is given cuts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainkit
from tests.contract.stepping import Case, _Rank
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError, TrainingError
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.base import LossWeighting, Numerics, Status, UpdateParams
from trainkit.strategies.core import step as module
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.refusals import _ELEMENTWISE, whole_reason
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor, apply_update


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    grads_of_steps: Sequence[Sequence[float | None]],
    *,
    through_stepper: bool,
    change: Callable[[torch.optim.Optimizer], object] = lambda _: None,
) -> torch.Tensor:
    """Two parameters after some steps; None leaves one out of a step; the optimizer is changed after the second."""
    params = [nn.Parameter(torch.full((3,), 1.0 + index)) for index in range(2)]
    optimizer = make(params)
    stepper = OptimizerStepper(optimizer, params)
    for step, values in enumerate(grads_of_steps):
        grads = [None if value is None else torch.full((3,), value) for value in values]
        if step == 2:
            change(optimizer)
        if through_stepper:
            stepper.step(grads, 1.0)
        else:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
    return torch.stack([param.detach() for param in params])


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_parameter_that_a_step_does_not_use_is_left_out_as_torch_does(make: Any) -> None:
    steps = [(0.5, 0.2), (0.1, 0.3), (0.4, None), (0.2, 0.7)]
    ours = stepped(make, steps, through_stepper=True)
    assert torch.equal(ours, stepped(make, steps, through_stepper=False))


class SlotsFromTheStart(torch.optim.SGD):
    """Makes its state in its constructor, as torch's Adagrad did up to 2.9; SGD does so in the first step."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        for param in params:
            self.state[param]["momentum_buffer"] = torch.full_like(param, 0.5)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_without_saved_slots_gets_those_of_a_new_optimizer(steps: int) -> None:
    params = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}
    stepper = OptimizerStepper(SlotsFromTheStart(list(params.values())), list(params.values()))
    for _ in range(steps):
        stepper.step([torch.ones(3), torch.ones(3)], 1.0)

    stepper.restore(params, {"optimizer/momentum_buffer/a": torch.full((3,), 2.0)})

    slots = {name: stepper.optimizer.state[param]["momentum_buffer"][0].item() for name, param in params.items()}
    assert slots == {"a": 2.0, "b": 0.5}


def test_slots_keep_their_dtype_in_a_restore() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    stepper = OptimizerStepper(torch.optim.NAdam([param]), [param])
    stepper.step([torch.ones_like(param)], 1.0)
    before = {key: slot.clone() for key, slot in stepper.state({"a": param}).items()}
    stepper.restore({"a": param}, before)  # torch would turn the product, a float32, into a float64
    assert before["optimizer/mu_product/a"].dtype is torch.float32
    after = stepper.state({"a": param})
    assert {key: slot.dtype for key, slot in after.items()} == {key: slot.dtype for key, slot in before.items()}


def test_slots_of_later_steps_are_gone_after_a_return_to_a_checkpoint_without_any() -> None:
    param = nn.Parameter(torch.ones(3))
    stepper = OptimizerStepper(torch.optim.SGD([param], lr=0.1, momentum=0.9), [param])
    stepper.step([torch.ones(3)], 1.0)

    stepper.restore({"a": param}, {})

    assert not stepper.optimizer.state


FOUR = [(0.5 / (step + 1), 0.2) for step in range(4)]


@pytest.mark.parametrize(
    "settings", [{"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"eps": 0.1}, {"amsgrad": True}, {"maximize": True}]
)
def test_settings_of_a_group_that_code_of_the_run_changes_hold_from_the_next_step_on(settings: dict[str, Any]) -> None:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0].update(settings)
        for slots in optimizer.state.values() if "amsgrad" in settings else ():
            slots["max_exp_avg_sq"] = torch.ones(3)

    ours = stepped(adamw, FOUR, through_stepper=True, change=change)
    assert torch.equal(ours, stepped(adamw, FOUR, through_stepper=False, change=change))
    assert not torch.equal(ours, stepped(adamw, FOUR, through_stepper=True))


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_is_registered_between_steps_is_called_from_the_next_step_on(is_global: bool) -> None:
    calls: list[object] = []
    handles = []

    def change(optimizer: torch.optim.Optimizer) -> None:
        register = register_optimizer_step_post_hook if is_global else optimizer.register_step_post_hook
        handles.append(register(lambda *args: calls.append(args)))

    stepped(adamw, FOUR, through_stepper=True, change=change)
    handles[0].remove()
    assert len(calls) == 2


def test_a_rate_that_code_of_the_run_sets_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"set the learning rate of group 0 of the optimizer to 0\.5"):
        stepped(adamw, FOUR, through_stepper=True, change=lambda optimizer: optimizer.param_groups[0].update(lr=0.5))


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The orders of the norms that are taken."""
    recorded, plain = list[float](), module._norms

    def norms(*args: object) -> torch.Tensor:
        recorded.append(args[-1])  # type: ignore[arg-type]
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_norms", norms)
    return recorded


def update_status(value: float, precision: str, max_norm: float | None) -> Status:
    rank = _Rank(None, Case(precision=precision, optimizer="sgd"))
    rank.numerics = Numerics(on_nonfinite="stop" if precision == "fp16_mixed" else "skip")
    replica = rank.setup(0).local
    assert isinstance(replica, Replica)
    sums = [torch.full_like(param, value) for param in replica.params.values()]
    rule = UpdateParams(lr_factor=1.0, max_norm=max_norm)
    return apply_update(replica, sums, LossDivisor(1.0, counted=False), rule)[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16_mixed"])
@pytest.mark.parametrize(
    ("value", "max_norm", "expected"), [(2.0, 1.0, [2.0]), (2.0, None, [torch.inf]), (1e30, 1.0, [2.0, torch.inf])]
)
def test_gradients_are_walked_once_to_be_judged_and_clipped(
    value: float, max_norm: float | None, expected: list[float], precision: str, orders: list[float]
) -> None:
    assert update_status(value, precision, max_norm) is Status.applied  # the squares of 1e30 are not finite
    assert orders == expected


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(("precision", "status"), [("fp32", Status.skipped), ("fp16_mixed", Status.retry)])
def test_an_update_of_what_is_not_finite_is_not_made(
    precision: str, status: Status, value: float, orders: list[float]
) -> None:
    assert update_status(value, precision, 1.0) is status
    assert orders == [2.0, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_counted_weight_that_was_planned_changes_no_bit(dtype: torch.dtype) -> None:
    weighing = LossWeighting(per_sample=None, planned=1.0, exact=True)
    for size in range(1, 200):
        divisor, weights = LossDivisor.of(weighing, size), torch.tensor([size, 0, size // 2], dtype=dtype)
        factors = divisor.factor(weights).tolist()
        assert factors[:2] == [1.0, 0.0]
        assert size < 2 or factors[2] == torch.tensor(size, dtype=dtype) / (size // 2)


class Adam(torch.optim.Optimizer):
    """Named like an elementwise one; scales an update by the norm of its parameter, as LAMB does."""

    def __init__(self, params: Any, lr: float, scales: bool = True) -> None:
        super().__init__(params, {"lr": lr, "scales": scales})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                slots = self.state[param]
                slots["sum"] = slots.get("sum", torch.zeros_like(param)) + param.grad.square()
                norm = param.detach().norm() if group["scales"] else 1.0
                param.data -= group["lr"] * norm * param.grad / (slots["sum"].sqrt() + 1e-8)


class Lamb(Adam):
    """Named like one of whole parameters; updates each element alone."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, scales=False)


class Factored(torch.optim.SGD):
    """Elementwise updates, and a state of rows."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["row"] = param.grad.square().flatten(1).mean(1) if param.dim() > 1 else param.grad
        return super().step(closure)


class Closing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure() + super().step()


WHOLE, UNTRIED = "uses whole parameters", "cannot be tried with cuts of a tensor"


@pytest.mark.parametrize(("kind", "text"), [
    (torch.optim.Adam, None), (torch.optim.SGD, None), (Lamb, None),
    (type("Own", (torch.optim.RMSprop,), {}), None),
    (type("Muon", (torch.optim.Optimizer,), {"elementwise": True}), None),
    (type("Adam", (torch.optim.Adam,), {"elementwise": False}), WHOLE),
    (Adam, WHOLE), (Factored, WHOLE), (type("Tuned", (torch.optim.Adafactor,), {}), WHOLE),
    (type("Tuned", (torch.optim.Muon,), {}), f"{UNTRIED} (ValueError: "), (Closing, f"{UNTRIED} (TypeError: "),
])  # fmt: skip
def test_a_class_says_it_of_itself_or_is_tried_with_cuts_of_a_tensor(kind: type, text: str | None) -> None:
    reason = whole_reason(kind)
    assert reason is None if text is None else (reason or "").startswith(text)


def test_every_optimizer_of_torch_that_is_called_elementwise_passes_the_trial() -> None:
    for kind in _ELEMENTWISE - {torch.optim.SparseAdam}:
        assert whole_reason(type("Own", (kind,), {})) is None, kind


def by_function(params: Any, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer of a user by a function."""
    return Adam(params, lr)


def test_groups_and_functions_are_tried_as_the_config_sets_them(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "own.yaml").write_text(
        f"{{_target_: {__name__}.Adam, lr: 1, scales: false, groups: {{}}}}"
    )
    (tmp_path / "optimizer" / "by_function.yaml").write_text(f"{{_target_: {__name__}.by_function, lr: 1}}")

    def planned(*more: str) -> None:
        keys = ["recipe=null", "data=digits", "strategy=fsdp", "strategy.replicas=2", *more]
        composition = trainkit.compose(keys, config_dirs=[tmp_path], packages=["tests"])
        with allow_packages(["tests"]):
            make_plan(checked(composition).cfg, num_gpus=0)

    planned("optimizer=own")
    with pytest.raises(ConfigError, match="Adam uses whole parameters, and here a rank has only parts of them"):
        planned("optimizer=own", "+optimizer.groups.b={match: ['*.bias'], scales: true}")
    with pytest.raises(ConfigError, match="The optimizer of this function uses whole parameters"):
        planned("optimizer=by_function")
