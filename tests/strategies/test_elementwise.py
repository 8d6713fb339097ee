"""An optimizer that needs whole parameters, has a harmless name and is given cuts of them is caught here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.core.refusals import _ELEMENTWISE, whole_reason


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
    found = whole_reason(kind)
    assert found is None if text is None else (found or "").startswith(text)


def test_every_optimizer_of_torch_that_is_called_elementwise_passes_the_trial() -> None:
    for kind in _ELEMENTWISE - {torch.optim.SparseAdam}:
        assert whole_reason(type("Own", (kind,), {})) is None, kind


def made(params: Any, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer of a user by a function."""
    return Adam(params, lr)


def test_groups_and_functions_are_tried_as_the_config_sets_them(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "own.yaml").write_text(
        f"{{_target_: {__name__}.Adam, lr: 1, scales: false, groups: {{}}}}"
    )
    (tmp_path / "optimizer" / "made.yaml").write_text(f"{{_target_: {__name__}.made, lr: 1}}")

    def planned(*more: str) -> None:
        keys = ["recipe=null", "data=digits", "strategy=fsdp", "strategy.replicas=2", *more]
        composition = trainkit.compose(keys, config_dirs=[tmp_path], packages=["tests"])
        with allow_packages(["tests"]):
            make_plan(checked(composition).cfg, num_gpus=0)

    planned("optimizer=own")
    with pytest.raises(ConfigError, match="Adam uses whole parameters, and here a rank has only parts of them"):
        planned("optimizer=own", "+optimizer.groups.b={match: ['*.bias'], scales: true}")
    with pytest.raises(ConfigError, match="The optimizer of this function uses whole parameters"):
        planned("optimizer=made")
