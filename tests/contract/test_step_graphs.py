"""`compile.mode=step`: graphs of whole steps train as eager steps do, and what no graph can hold is refused by name.

A graph of a whole step that keeps the gradients of one shard, or a rate of an earlier step is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract import stepping
from tests.contract.checks import assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Trained, train
from tests.support import own_objectives, zoo
from tests.support.pool import Pool
from trainkit.errors import HangError, TrainingError
from trainkit.models.gpt import Gpt
from trainkit.numerics.precision import Value
from trainkit.strategies.base import Facts, Numerics, PlanContext
from trainkit.strategies.core.graphs.shards import step_problems
from trainkit.strategies.model_transforms import ModelTransforms, shaping_problems

pytestmark = pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")

GRAPHS = ModelTransforms(compile_mode="step", backend="aot_eager")
"""The same graphs as the default's, without the code that takes seconds to make."""
POINTS = Case(shaping=GRAPHS)
COPIES = {"replicate": 2, "shard": 1}
TOKENS = Case(task="tokens", global_size=8, micro_size=3, max_norm=0.05, shaping=GRAPHS)
"""Counted weights, clipping, three shards a step, and a last batch of another size."""


@pytest.mark.parametrize(
    "case",
    [
        POINTS,
        TOKENS,
        pytest.param(replace(TOKENS, optimizer="adamw"), marks=pytest.mark.long),
        replace(POINTS, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=4),
        replace(POINTS, model={"norm": True}, micro_size=4),
        pytest.param(replace(TOKENS, strategy="mirrored", settings={"replicas": 2}), marks=pytest.mark.long),
        replace(POINTS, micro_size=3, optimizer="adamw", strategy="mirrored", settings={"replicas": 2}, resume_at=4),
        replace(POINTS, micro_size=3, optimizer="adamw", strategy="mesh", settings=COPIES, resume_at=4),
    ],
    ids=["sgd", "shards", "adamw", "resumed", "buffers", "mirrored", "mirrored_resumed", "mesh"],
)
@pytest.mark.slow
def test_six_steps_are_those_of_the_reference(case: Case, pool: Pool) -> None:
    assert_reference(train(pool, case), case)


@pytest.mark.slow
def test_the_gradients_of_several_shards_are_not_lost(pool: Pool) -> None:
    (whole,), (cut,) = (train(pool, replace(POINTS, micro_size=size)) for size in (8, 2))
    assert all(torch.allclose(one, cut.weights[name], rtol=1e-12) for name, one in whole.weights.items())


TOLERANCES: dict[Value, float] = {"fp32": 1e-5, "bf16": 0.05, "bf16_mixed": 0.05, "fp16_mixed": 0.01}
"""A few hundred roundings of the narrowest format that takes part."""


@pytest.mark.parametrize(
    ("precision", "micro_size"),
    [
        ("fp32", 3),
        ("bf16", 3),
        ("bf16_mixed", 8),
        ("fp16_mixed", 3),
        pytest.param("fp32", 8, marks=pytest.mark.matrix),
        pytest.param("bf16", 8, marks=pytest.mark.matrix),
        pytest.param("bf16_mixed", 3, marks=pytest.mark.matrix),
        pytest.param("fp16_mixed", 8, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.slow
def test_every_precision_trains_as_eagerly(precision: Value, micro_size: int, pool: Pool) -> None:
    trains_as_eagerly(replace(POINTS, precision=precision, micro_size=micro_size), pool)


@pytest.mark.long
@pytest.mark.parametrize("precision", TOLERANCES)
def test_two_replicas_train_as_eagerly_in_every_precision(precision: Value, pool: Pool) -> None:
    two = {"replicas": 2}
    trains_as_eagerly(replace(POINTS, precision=precision, micro_size=3, strategy="mirrored", settings=two), pool)


def trains_as_eagerly(case: Case, pool: Pool) -> None:
    case, tolerance = replace(case, max_norm=0.5, optimizer="adamw"), TOLERANCES[case.precision]  # type: ignore[index]
    for graphed, eager in zip(train(pool, case), train(pool, replace(case, shaping=ModelTransforms())), strict=True):
        assert largest_difference(graphed, eager) < tolerance
        assert graphed.scale == eager.scale
        assert graphed.norms == pytest.approx(eager.norms, rel=tolerance)


def largest_difference(one: Trained, other: Trained) -> float:
    return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in one.weights.items())


def graphs_made(case: Case, pool: Pool) -> int:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    train(pool, case)
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_a_ragged_last_batch_is_a_second_graph_and_other_rates_are_none(pool: Pool) -> None:
    assert graphs_made(replace(POINTS, num_steps=2), pool) == 1
    assert graphs_made(replace(POINTS, num_steps=10), pool) == 2


@pytest.mark.slow
def test_averages_are_those_of_eager_steps(tmp_path: Any) -> None:
    fixed = ("model=net", "data=points", "batch.global_size=8", "steps=6", "average=ema", "average.decay=0.5")
    graphed = run(tmp_path / "graphed", *fixed, "compile.mode=step", "compile.backend=aot_eager")
    eager = run(tmp_path / "eager", *fixed)
    assert weights(graphed).keys() == weights(eager).keys()
    assert all(torch.allclose(one, weights(eager)[name], rtol=1e-12) for name, one in weights(graphed).items())
    assert graphed["fingerprint"] == eager["fingerprint"]


@pytest.mark.parametrize("task", ["functional_dropout", "mixup"])
def test_a_model_or_an_objective_that_draws_ends_the_run(task: str, pool: Pool) -> None:
    with pytest.raises(TrainingError) as caught:
        train(pool, replace(POINTS, task=task))
    assert str(caught.value) == (
        "compile.mode=step: the model or the objective draws random numbers, which have no key inside of a graph. "
        "Use compile.mode=default."
    )


class Untraceable(zoo.Net):
    """Its code branches on its outputs from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        self.calls += 1
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        if self.calls > 1 and outputs.sum() > 1e9:
            return outputs * 2
        return outputs


@pytest.mark.slow
def test_code_that_cannot_be_traced_is_named(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setitem(stepping.TASKS, "untraceable", stepping.TASKS["classes"]._replace(model=Untraceable))
    with pytest.raises(
        TrainingError, match=r"compile.mode=step: this step cannot be one graph: .*branching.* Use compile"
    ):
        train(pool, replace(POINTS, task="untraceable"))


@pytest.mark.slow
def test_a_hang_while_tracing_stays_a_hang(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    def hangs(*_: object) -> None:
        raise HangError("rank 0 has made no progress")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: hangs)
    with pytest.raises(HangError, match="rank 0 has made no progress"):
        train(pool, POINTS)


ADAM = PlanContext(optimizer=torch.optim.Adam)
CAN = Facts(compiles="model", compiles_step=True)


class Penalty(own_objectives.GradientPenalty):
    """An objective that differentiates the model by its inputs."""


def net() -> nn.Module:
    return zoo.Net()


def dropping() -> nn.Module:
    return Gpt(vocab_size=4, context=2, num_layers=1, num_heads=1, width=2, dropout=0.1)


@pytest.mark.parametrize(("make", "facts", "context", "words"), [
    (net, Facts(compiles="nothing"), ADAM, "mine does not run steps as graphs. Leave it out, or"),
    (net, Facts(compiles="blocks"), ADAM, "mine does not run steps as graphs. Use compile.mode=default, or"),
    (net, CAN, PlanContext(numerics=Numerics(reproducible=True)), "does not work with numerics.reproducible=true"),
    (net, CAN, PlanContext(optimizers={"one": torch.optim.SGD}), "supports one update per step"),
    (net, CAN, PlanContext(objective=Penalty()), "has no graph of Penalty, which differentiates the model by its"),
    (dropping, CAN, ADAM, "the model draws random numbers (embed.dropout: Dropout)"),
    (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), CAN, ADAM, "has no graph of sparse gradients"),
], ids=["nothing", "blocks", "lanes", "optimizers", "derivatives", "dropout", "sparse"])  # fmt: skip
def test_what_no_graph_can_hold_is_refused_before_anything_starts(
    make: Any, facts: Facts, context: PlanContext, words: str
) -> None:
    (problem,) = step_problems(make(), GRAPHS, context, facts=facts, strategy="mine")
    assert str(problem).startswith(f"compile.mode=step: {words}")
    assert step_problems(make(), ModelTransforms(), context, facts=facts, strategy="mine") == []


def test_captures_are_refused_without_a_gpu_or_compiled_steps() -> None:
    captured = replace(GRAPHS, cuda_graphs=True)
    (problem,) = step_problems(net(), captured, ADAM, facts=CAN, strategy="mine")
    assert str(problem) == "compile.cuda_graphs=true: is for CUDA devices, and this run is on cpu. Leave it out."
    assert step_problems(net(), captured, ADAM, facts=CAN, strategy="mine", device="cuda:0") == []
    (problem,) = shaping_problems(net(), replace(captured, compile_mode="off"), compiles="model", strategy="mine")
    assert str(problem) == (
        "compile.cuda_graphs=true: replays compiled steps, and compile.mode=off compiles none. Use compile.mode=step."
    )


def test_recomputation_is_refused_beside_graphs() -> None:
    both = replace(GRAPHS, recompute="full")
    model = Gpt(vocab_size=4, context=2, num_layers=1, num_heads=1, width=2)
    (problem,) = shaping_problems(model, both, compiles="model", strategy="mine")
    assert str(problem) == (
        "compile.mode=step: does not work with activation_checkpointing: a graph chooses the tensors that it keeps. "
        "Leave one out."
    )
