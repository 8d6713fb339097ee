"""`compile.mode=default` under strategies whose threads and workers compute with copies of a model.

A compiled copy of a model that computes with the weights of the original, or two that compile at once is caught here
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import assert_reference
from tests.contract.stepping import Case, run_rank, train
from tests.support.pool import Pool
from trainkit.strategies.base import SetupRequest
from trainkit.strategies.central_storage import AsyncCentralExecutor, CentralExecutor, CentralStorage
from trainkit.strategies.core.copies import ComputingCopies
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.updates.chief import read_when_looked_up

pytestmark = pytest.mark.usefixtures("fresh_graphs")

COMPILED = ModelTransforms(compile_mode="default", backend="aot_eager")
POINTS = Case(micro_size=4, optimizer="adamw", max_norm=0.5, num_steps=4, resume_at=2, shaping=COMPILED)
"""Two shards a step, clipped, and continued in a new placement."""
THREADS: dict[str, Any] = {"strategy": "central_storage"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(POINTS, **THREADS), marks=pytest.mark.long),
        pytest.param(replace(POINTS, **THREADS, task="tokens"), marks=pytest.mark.long),
        pytest.param(replace(POINTS, **THREADS, model={"norm": True}), marks=pytest.mark.long),
    ],
    ids=["points", "tokens", "buffers"],
)
def test_its_steps_are_those_of_the_reference(case: Case, pool: Pool) -> None:
    assert_reference(train(pool, case), case)


@pytest.mark.slow
def test_rows_of_a_sparse_table_are_pulled_before_each_lookup_of_a_compiled_model() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    compiled = apply_transforms(model, COMPILED, compiles="model")
    assert is_compiled(compiled)
    pulled: list[list[int]] = []

    def pull(_place: int, rows: torch.Tensor) -> torch.Tensor:
        pulled.append(rows.tolist())
        return torch.full((len(rows), 2), float(len(pulled)))

    read_when_looked_up(compiled, pull)
    found = [compiled(torch.tensor(tokens)).tolist() for tokens in ([1, 3], [3, 4])]
    assert pulled == [[1, 3], [3, 4]]
    assert found == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2]


@pytest.mark.slow
def test_copies_take_turns_where_a_shape_is_new_and_compute_together_where_none_is() -> None:
    turns: list[bool] = []
    run = ComputingCopies.run

    def noted(self: ComputingCopies, compute: Any, works: Any, *, in_turn: bool = False) -> Any:
        turns.append(in_turn)
        return run(self, compute, works, in_turn=in_turn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputingCopies, "run", noted)
        run_rank(None, replace(POINTS, **THREADS, num_steps=3, resume_at=None))
    assert turns == [True, False, False]


@pytest.mark.slow
def test_what_threads_beside_the_loop_leave_to_evaluate_is_eager() -> None:
    case = replace(POINTS, strategy="central_storage", settings={"mode": "async"}, num_steps=1, resume_at=None)
    made: list[bool] = []
    setup = CentralStorage.setup

    def noted(self: CentralStorage, request: SetupRequest) -> CentralExecutor | AsyncCentralExecutor:
        executor = setup(self, request)
        made.append(is_compiled(executor.local.model))
        return executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CentralStorage, "setup", noted)
        run_rank(None, case)
    assert made == [False]
