"""Compiled steps that are called without guards compute what checked calls do, and only where nothing has changed.

A compiled step that is called without guards although a flag, a field or a parameter has changed is caught here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.contract.running import run, weights
from tests.contract.stepping import Case, train
from tests.support.pool import Pool
from trainkit.strategies.core.graphs.whole import DirectCall, WholeGraph
from trainkit.strategies.model_transforms import GraphSettings, ModelTransforms

pytestmark = pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")

GRAPHS = ModelTransforms(compile_mode="step", backend="aot_eager")
POINTS = Case(shaping=GRAPHS, num_steps=14)


@pytest.mark.parametrize(
    ("case", "least"),
    [
        (POINTS, 6),
        (replace(POINTS, micro_size=3, optimizer="adamw", max_norm=0.5, resume_at=6), 18),
        pytest.param(replace(POINTS, model={"norm": True}, micro_size=4), 10, marks=pytest.mark.long),
        pytest.param(replace(POINTS, task="tokens", global_size=8, micro_size=3), 30, marks=pytest.mark.long),
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
    assert all(torch.equal(one, checked.state[name]) for name, one in direct.state.items())


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
    read = {"scale": 2.0}
    graph = Graph(lambda values: (values * read["scale"],))
    found = [graph.again(one)[0].tolist() for one in (ONE, TWO, ONE)]
    assert found == [[2.0, 4.0], [6.0, 8.0], [2.0, 4.0]]
    read["scale"] = 3.0
    assert graph.again(ONE)[0].tolist() == [2.0, 4.0]
    assert graph(ONE)[0].tolist() == [3.0, 6.0]
    assert graph.again(ONE)[0].tolist() == graph.again(ONE)[0].tolist() == [3.0, 6.0]


@pytest.mark.parametrize("first", ["checked", "direct"])
def test_code_that_changes_objects_changes_them_in_each_call(first: str) -> None:
    kept = {"calls": 0}

    def counts(values: Tensor) -> tuple[Tensor]:
        kept["calls"] += 1
        return (values + 1,)

    graph = Graph(counts)
    if first == "checked":
        graph(ONE)
    for _ in range(5 - (first == "checked")):
        graph.again(ONE)
    assert kept["calls"] == 5


def test_other_shapes_flags_and_repeated_tensors_are_checked_again() -> None:
    def joined(values: tuple[Tensor, Tensor], negate: bool) -> tuple[Tensor, int]:
        total = values[0] * 2 + values[1]
        return (-total if negate else total), len(values[0])

    graph, short = Graph(joined), torch.tensor([5.0])
    for _ in range(2):
        for (one, other), negate in (((ONE, TWO), False), ((short, short + 1), False), ((ONE, TWO), True)):
            total, length = graph.again((one, other), negate)
            assert (total.tolist(), length) == ((one * 2 + other).mul(-1 if negate else 1).tolist(), len(one))
        assert graph.again((ONE, ONE), False)[0].tolist() == [3.0, 6.0]


def test_a_batch_with_other_fields_is_checked_again() -> None:
    graph = Graph(lambda batch: (batch["values"] * 2 if "values" in batch else batch["others"] * 3,))
    found = [graph.again({name: ONE})[0].tolist() for name in ("values", "values", "others", "values", "others")]
    assert found == [[2.0, 4.0], [2.0, 4.0], [3.0, 6.0], [2.0, 4.0], [3.0, 6.0]]


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
    assert all(torch.allclose(one, weights(eager)[name], rtol=1e-12) for name, one in weights(graphed).items())
    assert not any(torch.allclose(one, weights(eager)[name], rtol=1e-6) for name, one in weights(unchanged).items())
