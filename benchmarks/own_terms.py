"""Measure what a loss of two terms costs: two trainings of one process alternate, with the terms logged and without.

    python benchmarks/own_terms.py [--windows 100] [--steps 100]

Both compute the same two losses and train on their sum (W1: digits, MLP, batch 64, AdamW); one also returns the terms
by name, so that each step keeps them and each row logs them. A window of one is followed by a window of the other, and
each pair of windows gives a ratio of processor time, so that the load of a shared machine affects neither.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn import functional

import trainkit
from benchmarks import report
from trainkit.cluster.tasks import Identity
from trainkit.config.targets.allowed import allow_packages
from trainkit.objectives.base import Loss, Supervised
from trainkit.run.planning.build import make_optimizer, transformed_model
from trainkit.run.planning.plan import make_plan
from trainkit.run.session.restore import loader_of, make_run_view, make_step_context
from trainkit.strategies.base import SetupRequest, ignore_phase
from trainkit.trainer.loop import Trigger, TriggerSchedule, train
from trainkit.trainer.metrics_accumulator import MetricsAccumulator

OVERRIDES = (
    "recipe=null", "model=mlp", "data=digits", "optimizer=adamw", "optimizer.lr=0.001", "optimizer.groups={}",
    "schedule=constant", "batch.global_size=64", "epochs=100000", "eval.every_epochs=null", "checkpoint.keep_best=0",
)  # fmt: skip
TARGET = 1.03


class PlainSum(Supervised):
    """Two losses, and only their sum."""

    draws_nothing: ClassVar[bool] = True

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        terms = losses(outputs, targets)
        return Loss(terms["labels"] + terms["size"] * 0.01, float(len(targets)), None, outputs, targets)


class TwoTerms(Supervised):
    """The same two losses, each with its name."""

    draws_nothing: ClassVar[bool] = True
    term_names: ClassVar[tuple[str, ...]] = ("labels", "size")

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        terms = losses(outputs, targets)
        return Loss.of_terms(terms, float(len(targets)), factors={"size": 0.01}, outputs=outputs, targets=targets)


def losses(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return both losses of a shard, as sums."""
    labels = functional.cross_entropy(outputs, targets, reduction="sum")
    return {"labels": labels, "size": outputs.square().sum()}


class Contender:
    """A training that goes on by windows of steps."""

    def __init__(self, objective: str, folder: Path) -> None:
        conf = ROOT / "benchmarks" / "conf"
        run = trainkit.compose([*OVERRIDES, f"objective={objective}"], config_dirs=[conf], packages=["benchmarks"])
        with allow_packages(run.packages):
            plan = make_plan(run.cfg, num_gpus=0)
            strategy, model = plan.components.strategy, transformed_model(plan.cfg, plan.components.strategy)
            request = SetupRequest(
                model=model,
                identity=Identity.solo("cpu"),
                precision=plan.components.precision,
                numerics=plan.components.numerics,
                make_optimizer=make_optimizer(plan.cfg, model),
                training=make_step_context(plan),
                open_data=lambda _device: self.loader,
            )
            self.executor = strategy.setup(request)
        self.run = make_run_view(plan, self.executor, folder, ())
        self.loader = loader_of(plan, self.executor)
        terms = plan.components.objective.term_names
        self.journal = MetricsAccumulator(self.run, self.executor.local, lambda: self.loader.wait_s, terms=terms)
        self.row: dict[str, float] = {}
        log = Trigger(act=self._log, next_after=lambda step: (step // 10 + 1) * 10)
        self.timeline = TriggerSchedule([log], 0)

    def window(self, steps: int) -> float:
        """Train on, and return the seconds of a processor that a step takes."""
        begun = process_time()
        train(
            self.run,
            executor=self.executor,
            data=self.loader,
            step_end=(),
            journal=self.journal,
            timeline=self.timeline,
            last_step=self.run.state.step + steps,
            next_sync_step=lambda step: step,
            interrupted=lambda: None,
            on_phase=ignore_phase,
        )
        return (process_time() - begun) / steps

    def _log(self) -> None:
        self.row = self.journal.flush() or {}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, terms = Contender("plain_sum", Path(folder)), Contender("two_terms", Path(folder))
        taken: tuple[list[float], list[float]] = ([], [])
        for number in range(options.windows + 2):
            pair = [(plain, taken[0]), (terms, taken[1])]
            for contender, seconds in pair if number % 2 else reversed(pair):
                seconds.append(contender.window(options.steps))
        for contender in (plain, terms):
            contender.loader.close()
            contender.executor.close()
    assert plain.row["train/loss"] == terms.row["train/loss"], "the trainings differ"
    plain_s, terms_s = taken[0][2:], taken[1][2:]  # the first pairs warm up
    ratio = statistics.median(one / other for one, other in zip(terms_s, plain_s, strict=True))
    rows = [
        ["the sum alone", f"{statistics.median(plain_s) * 1e6:.0f}", "1"],
        ["two terms by name", f"{statistics.median(terms_s) * 1e6:.0f}", report.ratio(terms_s, plain_s)],
    ]
    report.write(
        "own_terms",
        "A loss of two terms, each logged, and their sum alone",
        f"python benchmarks/own_terms.py --windows {options.windows} --steps {options.steps}",
        report.table(
            ["", "microseconds of a processor a step", "ratio: median of pairs of windows (least to most)"], rows
        )
        + f"\n\nTarget: at most {TARGET:.2f}.",
    )
    print(f"ratio {ratio:.4f}")


if __name__ == "__main__":
    main()
