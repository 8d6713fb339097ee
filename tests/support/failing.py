"""Code of a user's that fails at a planted moment, and is mended afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Row, Run

planted: set[tuple[str, int]] = set()
"""(hook, step) at which `Failing` fails."""


def fail_at(hook: str, step: int) -> None:
    """Fail where that is planted."""
    if (hook, step) in planted:
        raise RuntimeError(f"planted in {hook} after step {step}")


@dataclass(frozen=True, kw_only=True)
class Failing(Callback):
    """Counts evaluations, as an early stop does, and fails."""

    counts: list[int] = field(default_factory=list, init=False, compare=False)

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        fail_at("step_end", run.state.step)

    def log(self, run: Run, row: Row) -> None:
        fail_at("log", run.state.step)

    def eval_end(self, run: Run, metrics: Row) -> None:
        self.counts.append(run.state.step)
        fail_at("eval_end", run.state.step)

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        fail_at("train_end", run.state.step)

    def state(self) -> dict[str, Any]:
        return {"counts": list(self.counts)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.counts[:] = saved["counts"]
