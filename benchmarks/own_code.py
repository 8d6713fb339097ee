"""Measure what two kinds of user code cost: a collate, and a loss of two terms that are logged.

    python benchmarks/own_code.py [--windows 100] [--steps 100]

Two pairs of trainings (digits, MLP, batch 64, AdamW):

- collate: the samples are read one by one, with `data.collate` and without. The collate stacks as trainkit does without
  one, so that the ratio is the cost of the hook: its call, its check of random numbers, and the count of its samples.
- two terms: both trainings compute the same two losses and train on their sum. One also returns the losses by name, so
  that each step keeps them and each row logs them.

The windows of the four trainings alternate in one process, and each pair of windows gives a ratio of processor time, so
that the load of a shared machine affects neither.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from trainkit.trainer.loop import TrainingLoop, Trigger, TriggerSchedule
from trainkit.trainer.metrics_accumulator import Instruments, MetricsAccumulator

OVERRIDES = (
    "recipe=null", "model=mlp", "data=digits", "optimizer=adamw", "optimizer.lr=0.001", "optimizer.groups={}",
    "schedule=constant", "batch.global_size=64", "epochs=100000", "eval.every_epochs=null", "checkpoint.keep_best=0",
)  # fmt: skip
PAIRS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "collate": (["loader.cache=false"], ["loader.cache=false", "data.collate=benchmarks.own_code.stacked"]),
    "two terms": (["objective=plain_sum"], ["objective=two_terms"]),
}
"""Name of a pair -> overrides of the plain training, and of the one with user code."""
TARGET = 1.03
WARMUP = 2
"""Pairs of windows that are not counted."""


def stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack images and classes."""
    return torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples])


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

    def __init__(self, overrides: Sequence[str], folder: Path) -> None:
        conf = ROOT / "benchmarks" / "conf"
        run = trainkit.compose([*OVERRIDES, *overrides], config_dirs=[conf], packages=["benchmarks"])
        with allow_packages(run.packages):
            plan = make_plan(run.cfg, num_gpus=0)
            strategy, identity = plan.components.strategy, Identity.solo("cpu")
            model = transformed_model(plan.cfg, strategy, identity.task)
            request = SetupRequest(
                model=model,
                identity=identity,
                precision=plan.components.precision,
                numerics=plan.components.numerics,
                make_optimizer=make_optimizer(plan.cfg, model),
                training=make_step_context(plan),
                open_data=lambda _device: self.loader,
            )
            self.executor = strategy.setup(request)
        self.run = make_run_view(plan, self.executor, folder, (), measure=lambda _name, _data: {})
        self.loader = loader_of(plan, self.executor.local.device, self.executor.assign)
        terms = plan.components.objective.term_names
        instruments = Instruments(torch.device("cpu"))
        self.journal = MetricsAccumulator(
            self.run, self.executor.local, lambda: self.loader.wait_s, instruments, terms=terms
        )
        self.row: dict[str, float] = {}
        self.seconds: list[float] = []
        log = Trigger(act=self._log, next_after=lambda step: (step // 10 + 1) * 10)
        self.timeline = TriggerSchedule([log], 0)

    def window(self, steps: int) -> None:
        """Train on; add the seconds of a processor that a step takes to `seconds`."""
        start = process_time()
        TrainingLoop(
            run=self.run,
            executor=self.executor,
            data=self.loader,
            step_end=(),
            journal=self.journal,
            timeline=self.timeline,
            last_step=self.run.state.step + steps,
            next_sync_step=lambda step: step,
            interrupted=lambda: None,
            on_phase=ignore_phase,
            expect_unchanged=lambda: None,
            on_acted=lambda: None,
        ).train()
        self.seconds.append((process_time() - start) / steps)

    def close(self) -> None:
        """Stop the loader and the executor."""
        self.loader.close()
        self.executor.close()

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
        pairs = {name: tuple(Contender(keys, Path(folder)) for keys in sides) for name, sides in PAIRS.items()}
        for number in range(WARMUP + options.windows):
            for pair in pairs.values():
                for contender in pair if number % 2 else reversed(pair):
                    contender.window(options.steps)
        for contender in (contender for pair in pairs.values() for contender in pair):
            contender.close()
    rows = []
    for name, (plain, custom) in pairs.items():
        assert plain.row["train/loss"] == custom.row["train/loss"], f"the trainings of the pair {name} differ"
        plain_s, custom_s = plain.seconds[WARMUP:], custom.seconds[WARMUP:]
        medians = [f"{statistics.median(seconds) * 1e6:.0f}" for seconds in (plain_s, custom_s)]
        rows.append([name, *medians, report.ratio(custom_s, plain_s, digits=3)])
    report.write(
        "own_code",
        "A collate, and a loss of two terms, each beside the same training without it",
        f"python benchmarks/own_code.py --windows {options.windows} --steps {options.steps}",
        report.table(
            ["", "microseconds of a processor a step, plain", "with user code", "ratio: median (least to most)"], rows
        )
        + f"\n\nTarget: at most {TARGET:.2f}.",
    )


if __name__ == "__main__":
    main()
