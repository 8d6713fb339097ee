"""Callbacks as users write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run


class Fails(Callback):
    """Raises an error in a hook, at a step."""

    def __init__(self, hook: str = "step_end", step: int = 2) -> None:
        self.hook, self.step = hook, step

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Fail, if this is the hook."""
        self._fail("step_end", run)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        """Evaluate, which this hook cannot."""
        if self.hook == "checkpoint_saved":
            run.evaluate()

    def log(self, run: Run, row: Mapping[str, float]) -> None:
        """Fail, if this is the hook."""
        self._fail("log", run)

    def _fail(self, hook: str, run: Run) -> None:
        if (hook, run.state.step) == (self.hook, self.step):
            raise ValueError("no such thing\nin two lines")


class Watches(Fails):
    """The same, and it only observes."""

    observes: ClassVar[bool] = True


class Scales(Callback):
    """Changes an attribute that the model's code reads, once: after step 23, or with its row."""

    def __init__(self, hook: str = "step_end") -> None:
        self.hook = hook

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Change it, if this is the hook."""
        self._scale("step_end", run)

    def log(self, run: Run, row: Mapping[str, float]) -> None:
        """Change it, if this is the hook."""
        self._scale("log", run)

    def _scale(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.state.step == 23:
            run.model.scale = 1.5  # type: ignore[assignment]


class ScalesRows(Scales):
    """The same, with no code after each step."""

    step_end = Callback.step_end


class Averages(Callback):
    """Keeps the average of the weights of this rank's parameters, evaluates with it, and restores the weights."""

    def __init__(self, evaluates: bool = True, keeps: bool = True) -> None:
        self.evaluates, self.keeps = evaluates, keeps
        self.averages: dict[str, Tensor] = {}
        self.steps = 0

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Count the weights in."""
        self.steps += 1
        for name, param in _parts(run.model).items():
            average = self.averages.get(name)
            self.averages[name] = param.clone() if average is None else average.lerp(param, 0.25)
        if self.evaluates and self.steps % 2 == 0:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        parts = _parts(run.model)
        originals = {name: param.clone() for name, param in parts.items()}
        for name, param in parts.items():
            param.copy_(self.averages[name])
        figures = run.evaluate("val")
        for name, param in parts.items():
            param.copy_(originals[name])
        if run.is_owner:
            with (run.folder / "averages.jsonl").open("a") as file:
                file.write(f"{json.dumps({'step': run.state.step, **figures})}\n")

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return {"steps": self.steps, "averages": self.averages, "nothing": []} if self.keeps else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue the averages."""
        assert saved["nothing"] == []
        self.steps, self.averages = saved["steps"], dict(saved["averages"])


def _parts(model: nn.Module) -> dict[str, Tensor]:
    parts = {name: getattr(param, "_local_tensor", param) for name, param in model.named_parameters()}
    return {name: part.detach() if isinstance(part, torch.Tensor) else part for name, part in parts.items()}


class Counts(Callback):
    """Keeps a count in a tensor, the same on every rank."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Count the step."""
        self.count += 1

    def state(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue the count."""
        self.count = saved["count"]


class ChangesParams(Callback):
    """Changes after a step what is trained: flags, a module, or one parameter more."""

    def __init__(self, how: Literal["unfreeze", "freeze", "replace", "add"] = "unfreeze", step: int = 2) -> None:
        self.how, self.step = how, step

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Change it."""
        if run.state.step != self.step:
            return
        assert isinstance(run.model, nn.Sequential)
        if self.how == "replace":
            run.model[2] = nn.Linear(7, 3)
        elif self.how == "add":
            run.model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
        else:
            run.model[0].requires_grad_(self.how == "unfreeze")
