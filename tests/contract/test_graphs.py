"""Compiled steps train as eager ones: graphs of steps and of shards, called without guards, replayed as CUDA graphs.

A graph that keeps the gradients of one shard, the batch or the rate of an earlier step, a draw of its code, a flag that
has changed since, and a compiled copy that computes with the weights of the original are caught here alone.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import gauss as shake
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.contract import stepping
from tests.contract.checks import assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Trained, run_rank, train
from tests.support import own_objectives, zoo
from tests.support.pool import Pool
from trainkit.errors import HangError, TrainingError
from trainkit.models.gpt import Gpt
from trainkit.numerics.precision import Value
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.linear_cross_entropy import linear_cross_entropy
from trainkit.strategies.base import Facts, Numerics, PlanContext, SetupRequest
from trainkit.strategies.central_storage import AsyncCentralExecutor, CentralExecutor, CentralStorage
from trainkit.strategies.core.copies import ComputingCopies
from trainkit.strategies.core.graphs import shards
from trainkit.strategies.core.graphs.captured import CapturingCaller, CudaCapture
from trainkit.strategies.core.graphs.shards import ShardGraphs, step_problems
from trainkit.strategies.core.graphs.whole import DirectCall, WholeGraph
from trainkit.strategies.model_transforms import GraphSettings, ModelTransforms, apply_transforms
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.updates.chief import read_when_looked_up

pytestmark = pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")

GRAPHS = ModelTransforms(compile_mode="step", backend="aot_eager")
"""The same graphs as the default's, without the code that takes seconds to make."""
POINTS = Case(shaping=GRAPHS)
COPIES = {"replicate": 2, "shard": 1}
TOKENS = Case(task="tokens", global_size=8, micro_size=4, max_norm=0.05, shaping=GRAPHS)
"""Counted weights, clipping, two shards a step, and a last batch of another size."""


@pytest.mark.parametrize(
    "case",
    [
        POINTS,
        TOKENS,
        pytest.param(replace(TOKENS, optimizer="adamw"), marks=pytest.mark.long),
        replace(POINTS, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=4),
        replace(POINTS, model={"norm": True}, micro_size=4),
        pytest.param(replace(TOKENS, strategy="mirrored", settings={"replicas": 2}), marks=pytest.mark.long),
        replace(POINTS, micro_size=3, optimizer="adamw", strategy="mesh", settings=COPIES, resume_at=4),
    ],
    ids=["sgd", "shards", "adamw", "resumed", "buffers", "mirrored", "mesh"],
)
@pytest.mark.slow
def test_six_steps_are_those_of_the_reference(case: Case, pool: Pool) -> None:
    assert_reference(train(pool, case), case)


TOLERANCES: dict[Value, float] = {"fp32": 1e-5, "bf16": 0.05, "bf16_mixed": 0.05, "fp16_mixed": 0.01}
"""A few hundred roundings of the narrowest format that takes part."""


@pytest.mark.parametrize(
    ("precision", "micro_size"),
    [("bf16_mixed", 8), ("fp16_mixed", 3)],
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


def largest_difference(actual: Trained, expected: Trained) -> float:
    return max(float((tensor - expected.weights[name]).abs().max()) for name, tensor in actual.weights.items())


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
    assert all(torch.allclose(tensor, weights(eager)[name], rtol=1e-12) for name, tensor in weights(graphed).items())
    assert graphed["fingerprint"] == eager["fingerprint"]


@pytest.mark.parametrize("task", ["functional_dropout", "mixup"])
def test_a_model_or_an_objective_that_draws_ends_the_run(task: str, pool: Pool) -> None:
    with pytest.raises(TrainingError, match=r"compile\.mode=step: the model or the objective draws .*mode=default\.$"):
        train(pool, replace(POINTS, task=task))


class Untraceable(zoo.Net):
    """Its code branches on its outputs from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        self.calls += 1
        outputs = super().forward(inputs)
        if self.calls > 1 and outputs.sum() > 1e9:
            return outputs * 2
        return outputs


@pytest.mark.slow
def test_code_that_cannot_be_traced_is_named(pool: Pool) -> None:
    with pytest.raises(
        TrainingError, match=r"compile.mode=step: this step cannot be one graph: .*branching.* Use compile"
    ):
        train(pool, replace(POINTS, build=Untraceable))


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


def test_captures_are_refused_without_a_gpu() -> None:
    captured = replace(GRAPHS, cuda_graphs=True)
    (problem,) = step_problems(net(), captured, ADAM, facts=CAN, strategy="mine")
    assert str(problem) == "compile.cuda_graphs=true: is for CUDA devices, and this run is on cpu. Leave it out."
    assert step_problems(net(), captured, ADAM, facts=CAN, strategy="mine", device="cuda:0") == []


DEFAULT = ModelTransforms(compile_mode="default", backend="aot_eager")
SHARDS = Case(shaping=DEFAULT, num_steps=4)
TOKEN_SHARDS = Case(task="tokens", global_size=8, micro_size=3, max_norm=0.05, shaping=DEFAULT)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[ShardGraphs]:
    """The graphs of the trainings of a test."""
    graphs: list[ShardGraphs] = []
    decide = ShardGraphs.decide

    def noted(self: ShardGraphs, work: Any) -> None:
        graphs.append(self)
        decide(self, work)

    monkeypatch.setattr(ShardGraphs, "decide", noted)
    return graphs


@pytest.fixture(params=["joint", "apart"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether forward and backward pass are one graph, as on the CPU for a small model, or two."""
    if request.param == "apart":
        monkeypatch.setattr(shards, "_FEW_OPERATIONS", 0)
    return str(request.param)


@pytest.mark.parametrize(
    "case",
    [
        replace(SHARDS, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=2),
        replace(SHARDS, model={"norm": True}, micro_size=4),
        pytest.param(TOKEN_SHARDS, marks=pytest.mark.long),
        pytest.param(replace(TOKEN_SHARDS, task="gpt"), marks=pytest.mark.long),
        pytest.param(replace(SHARDS, task="channels_last"), marks=pytest.mark.long),
    ],
    ids=["shards", "buffers", "tokens", "gpt", "channels_last"],
)
@pytest.mark.slow
def test_its_steps_are_those_of_the_reference(case: Case, passes: str, graphs: list[ShardGraphs], pool: Pool) -> None:
    assert_reference(train(pool, case), case)
    assert all(
        graph.is_whole and graph.is_joint == (passes == "joint" or case.task == "channels_last") for graph in graphs
    )
    assert graphs
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("cross_entropy", ["auto", "chunked"])
@pytest.mark.slow
def test_the_graph_holds_the_loss_from_all_scores_unless_chunks_are_asked_for(
    cross_entropy: Any, graphs: list[ShardGraphs], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.setitem(linear_cross_entropy.__kwdefaults__ or {}, "few", 0)
    trial = stepping.TASKS["gpt"]._replace(objective=lambda: LanguageModelling(cross_entropy=cross_entropy))
    monkeypatch.setitem(stepping.TASKS, "gpt", trial)
    case = replace(TOKEN_SHARDS, task="gpt", micro_size=8, num_steps=1)
    assert_reference(train(pool, case), case)
    assert [graph.is_whole for graph in graphs] == [cross_entropy == "auto"]


@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        *((precision, "aot_eager") for precision in TOLERANCES),
        *(pytest.param(precision, "inductor", marks=pytest.mark.long) for precision in ("bf16", "fp32")),
    ],
)
@pytest.mark.slow
def test_every_precision_of_a_shard_trains_as_eagerly(precision: Value, backend: str, pool: Pool) -> None:
    shaping = replace(DEFAULT, backend=backend)
    trains_as_eagerly(replace(SHARDS, precision=precision, micro_size=3, shaping=shaping), pool)


@pytest.mark.parametrize("task", ["functional_dropout", "mixup"])
@pytest.mark.slow
def test_what_draws_is_compiled_by_blocks_with_its_keys(task: str, graphs: list[ShardGraphs], pool: Pool) -> None:
    (compiled,), (eager,) = (
        train(pool, replace(SHARDS, task=task, shaping=shaping)) for shaping in (DEFAULT, ModelTransforms())
    )
    assert not any(graph.is_whole for graph in graphs)
    assert all(torch.equal(tensor, eager.weights[name]) for name, tensor in compiled.weights.items())


class Hidden(zoo.Net):
    """It draws by a name that its code does not show, from some call on."""

    def __init__(self, draw: Callable[[], Any], first: int) -> None:
        super().__init__()
        self.draw, self.first, self.noise = draw, first, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs = super().forward(inputs)
        return outputs + float(self.draw()) * 0.0 if self.first == 0 else outputs


DRAWS = {
    "torch": lambda: torch.rand(1), "numpy": np.random.rand, "numpy_normal": np.random.standard_normal,
    "random": lambda: random.gauss(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.slow
def test_a_first_pass_shows_a_draw_that_the_code_does_not(
    draw: Callable[[], Any], graphs: list[ShardGraphs], pool: Pool
) -> None:
    train(pool, replace(SHARDS, build=lambda: Hidden(draw, 0), num_steps=1))
    assert [graph.is_whole for graph in graphs] == [False]


class Later(nn.Module):
    """A layer that drops values, by a name that its code does not show, in batches of less than eight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> the same."""
        return getattr(nn.functional, "drop" + "out")(inputs) if inputs.shape[0] < 8 else inputs


class Shaken(zoo.Net):
    """It adds noise of Python's `random`, which it calls by a name of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        return super().forward(inputs) + shake(0, 0.1)


@pytest.mark.slow
def test_a_model_that_draws_with_python_keeps_its_keys(graphs: list[ShardGraphs], pool: Pool) -> None:
    (compiled,), (eager,) = (
        train(pool, replace(SHARDS, build=Shaken, shaping=shaping)) for shaping in (DEFAULT, ModelTransforms())
    )
    assert [graph.is_whole for graph in graphs] == [False]
    assert all(torch.equal(tensor, eager.weights[name]) for name, tensor in compiled.weights.items())


@pytest.mark.slow
def test_a_draw_that_comes_later_ends_the_run_by_name(passes: str, pool: Pool) -> None:
    case = replace(SHARDS, build=lambda: nn.Sequential(zoo.Net(), Later()), num_steps=10)
    with pytest.raises(TrainingError, match=r"^compile.mode: the module .*1.* \(Later\), by dropout, draws random"):
        train(pool, case)


class CountingCalls(zoo.Net):
    """It counts its calls, which a graph would compile anew for each."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        self.calls += 1
        return super().forward(inputs)


@pytest.mark.slow
def test_a_model_that_counts_in_python_is_compiled_by_blocks(graphs: list[ShardGraphs], pool: Pool) -> None:
    train(pool, replace(SHARDS, build=CountingCalls, num_steps=1))
    assert [graph.is_whole for graph in graphs] == [False]


class Branching(zoo.Net):
    """Its code branches on its outputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs = super().forward(inputs)
        return outputs * 2 if outputs.sum() > 1e9 else outputs


@pytest.mark.slow
def test_code_that_is_not_one_graph_is_compiled_by_blocks_and_said(
    caplog: pytest.LogCaptureFixture, pool: Pool
) -> None:
    (compiled,) = train(pool, replace(SHARDS, build=Branching))
    (eager,) = train(pool, replace(SHARDS, build=Branching, shaping=ModelTransforms()))
    assert all(torch.equal(tensor, eager.weights[name]) for name, tensor in compiled.weights.items())
    assert "blocks are compiled, because a shard cannot be one graph" in caplog.text


DIRECT = Case(shaping=GRAPHS, num_steps=14)


@pytest.mark.parametrize(
    ("case", "least"),
    [
        (DIRECT, 6),
        (replace(DIRECT, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=6), 18),
        pytest.param(replace(DIRECT, model={"norm": True}, micro_size=4), 10, marks=pytest.mark.long),
        pytest.param(replace(DIRECT, task="tokens", global_size=8, micro_size=3), 30, marks=pytest.mark.long),
    ],
    ids=["ragged", "shards_resumed", "buffers", "counted"],
)
@pytest.mark.slow
def test_direct_calls_give_the_bits_of_checked_calls(case: Case, least: int, pool: Pool) -> None:
    plain, calls = DirectCall.__call__, list[int]()

    def counted(call: DirectCall, leaves: Any) -> Any:
        calls.append(1)
        return plain(call, leaves)

    with patch.object(DirectCall, "__call__", counted):
        (direct,) = train(pool, case)
        assert len(calls) >= least
        (checked,) = train(pool, replace(case, checks_always=True))
    assert all(torch.equal(tensor, checked.state[name]) for name, tensor in direct.state.items())


class Graph(WholeGraph):
    """A graph that the backend leaves as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        settings = GraphSettings(covers="step", backend="eager")
        super().__init__(function, settings, torch.device("cpu"), is_joint=True)

    def again(self, *args: Any) -> Any:
        """Call it where nothing has changed."""
        return tuple(self(*args, unchanged=True))


ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


def test_only_a_checked_call_sees_what_other_code_has_changed() -> None:
    settings = {"scale": 2.0}
    graph = Graph(lambda values: (values * settings["scale"],))
    outputs = [graph.again(batch)[0].tolist() for batch in (ONE, TWO, ONE)]
    assert outputs == [[2.0, 4.0], [6.0, 8.0], [2.0, 4.0]]
    settings["scale"] = 3.0
    assert graph.again(ONE)[0].tolist() == [2.0, 4.0]
    assert graph(ONE)[0].tolist() == [3.0, 6.0]
    assert graph.again(ONE)[0].tolist() == graph.again(ONE)[0].tolist() == [3.0, 6.0]


@pytest.mark.parametrize("first", ["checked", "direct"])
def test_code_that_changes_objects_changes_them_in_each_call(first: str) -> None:
    state = {"calls": 0}

    def counts(values: Tensor) -> tuple[Tensor]:
        state["calls"] += 1
        return (values + 1,)

    graph = Graph(counts)
    if first == "checked":
        graph(ONE)
    for _ in range(5 - (first == "checked")):
        graph.again(ONE)
    assert state["calls"] == 5


def test_other_shapes_flags_and_repeated_tensors_are_checked_again() -> None:
    def joined(values: tuple[Tensor, Tensor], negate: bool) -> tuple[Tensor, int]:
        total = values[0] * 2 + values[1]
        return (-total if negate else total), len(values[0])

    graph, short = Graph(joined), torch.tensor([5.0])
    for _ in range(2):
        for (first, second), negate in (((ONE, TWO), False), ((short, short + 1), False), ((ONE, TWO), True)):
            total, length = graph.again((first, second), negate)
            assert (total.tolist(), length) == ((first * 2 + second).mul(-1 if negate else 1).tolist(), len(first))
        assert graph.again((ONE, ONE), False)[0].tolist() == [3.0, 6.0]


def test_a_batch_with_other_fields_is_checked_again() -> None:
    graph = Graph(lambda batch: (batch["values"] * 2 if "values" in batch else batch["others"] * 3,))
    outputs = [graph.again({name: ONE})[0].tolist() for name in ("values", "values", "others", "values", "others")]
    assert outputs == [[2.0, 4.0], [2.0, 4.0], [3.0, 6.0], [2.0, 4.0], [3.0, 6.0]]


@pytest.mark.parametrize("wrap", [list, lambda parts: {"kept": parts[0]}, lambda parts: parts[0]])
def test_results_that_hold_an_input_or_a_container_are_those_of_each_call(wrap: Callable[[Any], Any]) -> None:
    graph = Graph(lambda values: (values + 1, wrap((values, values * 2))))
    graph.again(ONE)
    graph.again(ONE)
    assert torch.utils._pytree.tree_leaves(graph.again(TWO)[1])[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("callback", "rows"), [("scales", 30), pytest.param("scales_rows", 23, marks=pytest.mark.long)]
)
@pytest.mark.slow
def test_what_a_callback_changes_between_steps_changes_the_next_one(callback: str, rows: int, tmp_path: Path) -> None:
    fixed = ("model=scaled", "data=points", "batch.global_size=8", "steps=30", f"log_every_steps={rows}")
    graphs = ("compile.mode=step", "compile.backend=aot_eager")
    eager = run(tmp_path / "eager", *fixed, f"callbacks=[{callback}]")
    unchanged = run(tmp_path / "unchanged", *fixed)
    graphed = run(tmp_path / "graphed", *fixed, f"callbacks=[{callback}]", *graphs)
    assert all(torch.allclose(tensor, weights(eager)[name], rtol=1e-12) for name, tensor in weights(graphed).items())
    assert not any(torch.allclose(t, weights(eager)[name], rtol=1e-6) for name, t in weights(unchanged).items())


class Repeats:
    """A recording that runs the function again on the same tensors, and fills the same outputs; recording runs nothing
    that lasts.
    """

    def __init__(self, state: Sequence[Tensor]) -> None:
        self._state = state
        self._run: Callable[[], Sequence[Tensor]]
        self._outputs: Sequence[Tensor]

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Keep the function."""
        before = [tensor.clone() for tensor in self._state]
        self._run, self._outputs = run, run()
        for tensor, original in zip(self._state, before, strict=True):
            tensor.copy_(original)
        return self._outputs

    def replay(self) -> None:
        """Run it."""
        for output, value in zip(self._outputs, self._run(), strict=True):
            output.copy_(value)


class Summing:
    """Adds batches to a total, by a graph that is captured with doubles."""

    def __init__(self, make: Callable[[Sequence[Tensor]], Repeats] = Repeats) -> None:
        self.total = torch.zeros(2)
        self.captures = 0
        self._pool = WeakSet[Repeats]()
        self._make = make
        settings = GraphSettings(covers="step", backend="eager")
        caller = CapturingCaller(self._capture)
        self.graph = WholeGraph(self._added, settings, torch.device("cpu"), is_joint=True, call=caller)

    def _capture(self) -> Repeats:
        gc.collect()  # a double refers to its call, a CUDA graph does not
        if self.captures and not self._pool:
            raise RuntimeError("use_count > 0")  # of CUDA: a pool that has lost its last graph is not used again
        self.captures += 1
        recording = self._make([self.total])
        self._pool.add(recording)
        return recording

    def _added(self, batch: Tensor) -> tuple[Tensor, int]:
        self.total.add_(batch.sum())
        return batch * 2, 7

    def add(self, batch: Tensor, *, unchanged: bool = True) -> tuple[list[float], int]:
        """Add a batch; what the graph returned."""
        doubled, seven = self.graph(batch, unchanged=unchanged)
        return doubled.tolist(), seven


@pytest.mark.slow
def test_replays_take_new_batches_and_change_the_state_once_a_step() -> None:
    summing = Summing()
    for step in range(1, 9):
        assert summing.add(torch.full((2,), float(step))) == ([2.0 * step] * 2, 7)
        assert summing.total.tolist() == [step * (step + 1.0)] * 2
    assert summing.captures == 1


@pytest.mark.slow
def test_a_result_outlives_the_next_replay() -> None:
    summing = Summing()
    for _ in range(6):
        summing.add(torch.ones(2))
    first, _ = summing.graph(torch.ones(2), unchanged=True)
    summing.add(torch.zeros(2))
    assert first.tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_checked_step_needs_no_other_capture_and_moved_tensors_do() -> None:
    summing = Summing()
    for step in range(12):
        summing.add(torch.ones(2), unchanged=step % 6 != 5)
    assert (summing.captures, summing.total.tolist()) == (1, [24.0, 24.0])
    summing.total.set_(torch.zeros(2))  # type: ignore[call-overload] # moved without a change of the object
    for step in range(6):
        summing.add(torch.ones(2), unchanged=step > 0)
    assert (summing.captures, summing.total.tolist()) == (2, [12.0, 12.0])


@pytest.mark.slow
def test_batches_of_another_shape_are_called_directly() -> None:
    summing = Summing()
    for step in range(1, 13):
        size = 1 if step % 6 == 0 else 2
        assert summing.add(torch.ones(size)) == ([2.0] * size, 7)
    assert (summing.captures, summing.total.tolist()) == (1, [22.0, 22.0])


class Refused(Repeats):
    """A recording that the device refuses."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Refuse."""
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.slow
def test_a_step_that_cannot_be_captured_is_called_directly_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    summing = Summing(Refused)
    with caplog.at_level(logging.WARNING, "trainkit"):
        for _ in range(10):
            summing.add(torch.ones(2))
    (record,) = (record for record in caplog.records if record.name.startswith("trainkit"))
    assert record.getMessage().startswith("compile.cuda_graphs: a step cannot be captured")
    assert record.getMessage().endswith("operation not permitted when stream is capturing")
    assert (summing.captures, summing.total.tolist()) == (1, [20.0, 20.0])


def test_a_step_that_also_reads_another_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    batch, other = torch.ones(2), torch.zeros((), device="meta")
    call = DirectCall(
        graph=lambda values, _: [values],
        inputs=[None, other],
        places=[2, 1],
        layout=((), (), ()),
        takes=bool,
        constants=(),
        results=[],
    )
    caller = CapturingCaller(partial(Repeats, []))
    for _ in range(5):
        caller(call, [batch])
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["it uses tensors on cpu and meta"]


class FailingGraph:
    """`torch.cuda.graph` of a capture that fails: it raises before it leaves its stream."""

    def __init__(self, streams: list[str]) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._streams.append("capture")

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class Stream:
    """`torch.cuda.stream`: the last of the streams is the current one."""

    def __init__(self, streams: list[str], name: str) -> None:
        self._streams, self._name, self._before = streams, name, list(streams)

    def __enter__(self) -> None:
        self._streams.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._streams[:] = self._before


def test_after_a_capture_that_fails_stream_and_allocator_are_those_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, freed = ["training"], list[tuple[str, int, tuple[int, int]]]()
    for call in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{call}", lambda *args, call=call: freed.append((call, *args)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_args, **_kwargs: FailingGraph(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", partial(Stream, streams))
    with pytest.raises(RuntimeError, match="during capture"):
        CudaCapture((0, 3)).record(list)  # type: ignore[arg-type] # a pool
    assert streams == ["training"]
    assert freed == [("endAllocateToPool", 1, (0, 3)), ("releasePool", 1, (0, 3))]


CAPTURED = ModelTransforms(compile_mode="step", cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of inductor and triton, about tensor cores, processors, old syntax
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("micro_size", [8, 3])
def test_on_a_gpu_captured_steps_give_the_bits_of_direct_ones(
    precision: Any, micro_size: int, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        settings={"device": "cuda:0"},
        optimizer="adamw",
        micro_size=micro_size,
        precision=precision,
        max_norm=0.5,
        num_steps=30,
        shaping=CAPTURED,
    )
    replays, plain = list[int](), CudaCapture.replay

    def counted(capture: CudaCapture) -> None:
        replays.append(1)
        plain(capture)

    monkeypatch.setattr(CudaCapture, "replay", counted)
    (captured,) = train(pool, case)
    assert replays
    (direct,) = train(pool, replace(case, shaping=replace(CAPTURED, cuda_graphs=False)))
    assert all(torch.equal(tensor, direct.state[name]) for name, tensor in captured.state.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
def test_on_a_gpu_moved_tensors_are_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda", 0)
    caller = CapturingCaller(partial(CudaCapture, torch.cuda.graph_pool_handle()))

    def add(batch: Tensor) -> tuple[Tensor]:
        return (total.add_(batch @ batch).sum(),)

    graph = WholeGraph(add, GraphSettings(covers="step", backend="eager"), device, is_joint=True, call=caller)
    total, ones = torch.zeros(2, 2, device=device), torch.ones(2, 2, device=device)
    for _ in range(2):
        total.set_(torch.zeros(2, 2, device=device))  # type: ignore[call-overload]
        sums = [graph(ones, unchanged=step > 0)[0].item() for step in range(8)]
        assert sums == [8.0 * step for step in range(1, 9)]
    assert caplog.records == []


@pytest.mark.gpu
def test_on_a_gpu_a_capture_that_fails_leaves_no_trace() -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        CudaCapture(torch.cuda.graph_pool_handle()).record(
            lambda: [torch.ones(int(torch.ones(1, device="cuda").item()))]
        )
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()  # an error while torch takes a capture to be under way
    assert torch.ones(2, device="cuda").sum().item() == 2.0


COPIED = Case(micro_size=4, optimizer="adamw", max_norm=0.5, num_steps=4, resume_at=2, shaping=DEFAULT)
"""Two shards a step, clipped, and continued in a new placement."""
THREADS: dict[str, Any] = {"strategy": "central_storage"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(COPIED, **THREADS), marks=pytest.mark.long),
        pytest.param(replace(COPIED, **THREADS, task="tokens"), marks=pytest.mark.long),
        pytest.param(replace(COPIED, **THREADS, model={"norm": True}), marks=pytest.mark.long),
    ],
    ids=["points", "tokens", "buffers"],
)
def test_steps_of_threads_are_those_of_the_reference(case: Case, pool: Pool) -> None:
    assert_reference(train(pool, case), case)


@pytest.mark.slow
def test_rows_of_a_sparse_table_are_pulled_before_each_lookup_of_a_compiled_model() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    compiled = apply_transforms(model, DEFAULT, compiles="model")
    assert is_compiled(compiled)
    pulled: list[list[int]] = []

    def pull(_place: int, rows: torch.Tensor) -> torch.Tensor:
        pulled.append(rows.tolist())
        return torch.full((len(rows), 2), float(len(pulled)))

    read_when_looked_up(compiled, pull)
    outputs = [compiled(torch.tensor(tokens)).tolist() for tokens in ([1, 3], [3, 4])]
    assert pulled == [[1, 3], [3, 4]]
    assert outputs == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2]


@pytest.mark.slow
def test_copies_take_turns_where_a_shape_is_new_and_compute_together_where_none_is() -> None:
    turns: list[bool] = []
    may_compile = ComputingCopies.may_compile

    def noted(self: ComputingCopies, batch: Any) -> bool:
        turns.append(may_compile(self, batch))
        return turns[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputingCopies, "may_compile", noted)
        run_rank(None, replace(COPIED, **THREADS, num_steps=3, resume_at=None))
    assert turns == [True, False, False]


@pytest.mark.slow
def test_what_threads_beside_the_loop_leave_to_evaluate_is_eager() -> None:
    case = replace(COPIED, strategy="central_storage", settings={"mode": "async"}, num_steps=1, resume_at=None)
    are_compiled: list[bool] = []
    setup = CentralStorage.setup

    def noted(self: CentralStorage, request: SetupRequest) -> CentralExecutor | AsyncCentralExecutor:
        executor = setup(self, request)
        are_compiled.append(is_compiled(executor.local.model))
        return executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CentralStorage, "setup", noted)
        run_rank(None, case)
    assert are_compiled == [False]
