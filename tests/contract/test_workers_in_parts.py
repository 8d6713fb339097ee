"""Workers of a parameter server that are several processes, against one device.

A gradient of which a process of a worker pushes its part alone, or a variable of which it keeps another's part, is
caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.stepping import Case, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.strategies.updates.scheduler import FILE

pytestmark = [pytest.mark.pairwise, pytest.mark.slow]

CLASSES = Case(task="classes", global_size=16, micro_size=3, optimizer="adamw")  # batches of 6 shards and of 2
TOKENS = Case(task="tokens", global_size=8, micro_size=2)
GPT = replace(TOKENS, build=zoo.even_gpt, max_norm=0.1)


def served(case: Case, **settings: Any) -> Case:
    settings = {"workers": 1, "servers": 1, "timeout_s": 60.0, **settings}
    return replace(case, strategy="parameter_server", settings=settings)


def first_frozen() -> nn.Module:
    model = zoo.Net()
    model[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "clipped": (replace(CLASSES, max_norm=0.05), {"shard": 2, "workers": 2, "servers": 2}),
    "an order without a shard for each": (replace(CLASSES, micro_size=6), {"shard": 2}),
    "counted targets": (replace(TOKENS, max_norm=0.05), {"shard": 2}),
    "with a spare": (CLASSES, {"shard": 2, "workers": 2, "spare_replicas": 1}),
    "continued": (replace(CLASSES, resume_at=4), {"shard": 2}),
    "layers": (GPT, {"tensor": 2}),
    "layers and shards": (GPT, {"shard": 2, "tensor": 2}),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_worker_in_parts_trains_as_one_device(kind: str, pool: Pool) -> None:
    case, settings = CASES[kind]
    assert_reference(train(pool, served(case, **settings)), replace(case, resume_at=None))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_noise_and_statistics_are_those_of_one_device(mode: str, pool: Pool) -> None:
    case = replace(CLASSES, optimizer="sgd", model={"norm": True, "dropout": 0.3}, max_norm=0.5)
    assert_close(train(pool, served(case, shard=2, mode=mode)), alone(case))


def test_frozen_parameters_stay_as_they_were(pool: Pool) -> None:
    case = replace(CLASSES, build=first_frozen)
    assert_close(train(pool, served(case, shard=2, workers=2)), alone(case))


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", "fp16_mixed"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_low_precisions_are_near_those_of_a_whole_worker(precision: str, mode: str, pool: Pool) -> None:
    case = replace(CLASSES, precision=precision)
    (whole,), (parts,) = (train(pool, served(case, mode=mode, shard=shard)) for shard in (1, 2))
    torch.testing.assert_close(parts.state, whole.state, rtol=2.0**-6, atol=2.0**-8)
    assert parts.scale == whole.scale


def test_an_asynchronous_run_of_whole_workers_is_repeated_by_one_in_parts(pool: Pool, tmp_path: Path) -> None:
    case = served(replace(CLASSES, folder=tmp_path), workers=2, mode="async")
    (recorded,) = train(pool, case)
    assert len((tmp_path / FILE).read_text().splitlines()) == case.num_steps
    again = served(CLASSES, shard=2, mode="async", replay=str(tmp_path))
    assert_close(train(pool, again), recorded)


def test_transfers_in_bfloat16_are_near_those_of_a_whole_worker(pool: Pool) -> None:
    case = replace(CLASSES, precision="fp32", optimizer="sgd")
    (whole,), (parts,) = (train(pool, served(case, transfer="bf16", shard=shard)) for shard in (1, 2))
    torch.testing.assert_close(parts.state, whole.state, rtol=2.0**-6, atol=2.0**-8)
