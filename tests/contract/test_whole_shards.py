"""`compile.mode=default`: a model that draws nothing is compiled with its loss, and trains as eagerly.

A model that is compiled with its loss and loses gradients of earlier shards, or a draw of its code is caught here
alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import gauss as shake
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract import stepping
from tests.contract.checks import assert_reference
from tests.contract.stepping import Case, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.errors import TrainingError
from trainkit.numerics.precision import Value
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.linear_cross_entropy import linear_cross_entropy
from trainkit.strategies.core.graphs import shards
from trainkit.strategies.core.graphs.shards import ShardGraphs
from trainkit.strategies.model_transforms import ModelTransforms

pytestmark = pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")

DEFAULT = ModelTransforms(compile_mode="default", backend="aot_eager")
POINTS = Case(shaping=DEFAULT, num_steps=4)
TOKENS = Case(task="tokens", global_size=8, micro_size=3, max_norm=0.05, shaping=DEFAULT)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ShardGraphs]:
    """The graphs of the trainings of a test."""
    found: list[ShardGraphs] = []
    decide = ShardGraphs.decide

    def noted(self: ShardGraphs, work: Any) -> None:
        found.append(self)
        decide(self, work)

    monkeypatch.setattr(ShardGraphs, "decide", noted)
    return found


@pytest.fixture(params=["joint", "apart"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether forward and backward pass are one graph, as on the CPU for a small model, or two."""
    if request.param == "apart":
        monkeypatch.setattr(shards, "_FEW_OPERATIONS", 0)
    return str(request.param)


@pytest.mark.parametrize(
    "case",
    [
        replace(POINTS, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=2),
        replace(POINTS, model={"norm": True}, micro_size=4),
        pytest.param(TOKENS, marks=pytest.mark.long),
        pytest.param(replace(TOKENS, task="gpt"), marks=pytest.mark.long),
        pytest.param(replace(POINTS, task="channels_last"), marks=pytest.mark.long),
    ],
    ids=["shards", "buffers", "tokens", "gpt", "channels_last"],
)
@pytest.mark.slow
def test_its_steps_are_those_of_the_reference(case: Case, passes: str, made: list[ShardGraphs], pool: Pool) -> None:
    assert_reference(train(pool, case), case)
    assert all(
        graph.is_whole and graph.is_joint == (passes == "joint" or case.task == "channels_last") for graph in made
    )
    assert made
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("asked", ["auto", "chunked"])
@pytest.mark.slow
def test_the_graph_holds_the_loss_from_all_scores_unless_chunks_are_asked_for(
    asked: Any, made: list[ShardGraphs], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setitem(linear_cross_entropy.__kwdefaults__ or {}, "few", 0)
    trial = stepping.TASKS["gpt"]._replace(objective=lambda: LanguageModelling(cross_entropy=asked))
    monkeypatch.setitem(stepping.TASKS, "gpt", trial)
    case = replace(TOKENS, task="gpt", micro_size=8, num_steps=1)
    assert_reference(train(pool, case), case)
    assert [graph.is_whole for graph in made] == [asked == "auto"]


TOLERANCES: dict[Value, float] = {"fp32": 1e-5, "bf16": 0.05, "bf16_mixed": 0.05, "fp16_mixed": 0.01}
"""A few hundred roundings of the narrowest format that takes part."""


@pytest.mark.parametrize(
    ("precision", "micro_size", "backend"),
    [
        *((precision, 3, "aot_eager") for precision in TOLERANCES),
        *(
            pytest.param(*case, marks=pytest.mark.long if case[2] == "inductor" else pytest.mark.matrix)
            for case in [*product(TOLERANCES, [8], ["aot_eager"]), ("bf16", 3, "inductor"), ("fp32", 3, "inductor")]
        ),
    ],
)
@pytest.mark.slow
def test_every_precision_trains_as_eagerly(precision: Value, micro_size: int, backend: str, pool: Pool) -> None:
    case = replace(POINTS, precision=precision, micro_size=micro_size, max_norm=0.5, optimizer="adamw")
    compiled = replace(case, shaping=replace(DEFAULT, backend=backend))
    (one,), (other,) = train(pool, compiled), train(pool, replace(case, shaping=ModelTransforms()))
    largest = max(float((tensor - other.weights[name]).abs().max()) for name, tensor in one.weights.items())
    assert largest < TOLERANCES[precision]
    assert one.scale == other.scale
    assert one.norms == pytest.approx(other.norms, rel=TOLERANCES[precision])


@pytest.mark.parametrize("task", ["functional_dropout", "mixup"])
@pytest.mark.slow
def test_what_draws_is_compiled_by_blocks_with_its_keys(task: str, made: list[ShardGraphs], pool: Pool) -> None:
    (compiled,), (eager,) = (
        train(pool, replace(POINTS, task=task, shaping=one)) for one in (DEFAULT, ModelTransforms())
    )
    assert not any(graph.is_whole for graph in made)
    assert all(torch.equal(one, eager.weights[name]) for name, one in compiled.weights.items())


class Hidden(zoo.Net):
    """It draws by a name that its code does not show, from some call on."""

    def __init__(self, draw: Callable[[], Any], first: int) -> None:
        super().__init__()
        self.draw, self.first, self.noise = draw, first, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs + float(self.draw()) * 0.0 if self.first == 0 else outputs


DRAWS = {
    "torch": lambda: torch.rand(1), "numpy": np.random.rand, "numpy_normal": np.random.standard_normal,
    "random": lambda: random.gauss(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.slow
def test_a_first_pass_shows_a_draw_that_the_code_does_not(
    draw: Callable[[], Any], made: list[ShardGraphs], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    trial = stepping.TASKS["classes"]._replace(model=lambda: Hidden(draw, 0))
    monkeypatch.setitem(stepping.TASKS, "hidden_draw", trial)
    train(pool, replace(POINTS, task="hidden_draw", num_steps=1))
    assert [graph.is_whole for graph in made] == [False]


class Later(nn.Module):
    """A layer that drops values, by a name that its code does not show, in batches of less than eight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> the same."""
        return getattr(nn.functional, "drop" + "out")(inputs) if inputs.shape[0] < 8 else inputs


class Shaken(zoo.Net):
    """It adds noise of Python's `random`, which it calls by a name of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs + shake(0, 0.1)


@pytest.mark.slow
def test_a_model_that_draws_with_python_keeps_its_keys(
    made: list[ShardGraphs], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setitem(stepping.TASKS, "shaken", stepping.TASKS["classes"]._replace(model=Shaken))
    (compiled,), (eager,) = (
        train(pool, replace(POINTS, task="shaken", shaping=one)) for one in (DEFAULT, ModelTransforms())
    )
    assert [graph.is_whole for graph in made] == [False]
    assert all(torch.equal(one, eager.weights[name]) for name, one in compiled.weights.items())


@pytest.mark.slow
def test_a_draw_that_comes_later_ends_the_run_by_name(passes: str, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    def model() -> nn.Module:
        return nn.Sequential(zoo.Net(), Later())

    monkeypatch.setitem(stepping.TASKS, "later", stepping.TASKS["classes"]._replace(model=model))
    with pytest.raises(TrainingError, match=r"^compile.mode: the module .*1.* \(Later\), by dropout, draws random"):
        train(pool, replace(POINTS, task="later", num_steps=10))


class Counting(zoo.Net):
    """It counts its calls, which a graph would compile anew for each."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        self.calls += 1
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


@pytest.mark.slow
def test_a_model_that_counts_in_python_is_compiled_by_blocks(
    made: list[ShardGraphs], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setitem(stepping.TASKS, "counting", stepping.TASKS["classes"]._replace(model=Counting))
    train(pool, replace(POINTS, task="counting", num_steps=1))
    assert [graph.is_whole for graph in made] == [False]


class Branching(zoo.Net):
    """Its code branches on its outputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs * 2 if outputs.sum() > 1e9 else outputs


@pytest.mark.slow
def test_code_that_is_not_one_graph_is_compiled_by_blocks_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pool: Pool
) -> None:
    monkeypatch.setitem(stepping.TASKS, "branching", stepping.TASKS["classes"]._replace(model=Branching))
    (compiled,) = train(pool, replace(POINTS, task="branching"))
    (eager,) = train(pool, replace(POINTS, task="branching", shaping=ModelTransforms()))
    assert all(torch.equal(one, eager.weights[name]) for name, one in compiled.weights.items())
    assert "blocks are compiled, because a shard cannot be one graph" in caplog.text
