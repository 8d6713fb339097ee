"""The strategy that docs/adding-a-strategy.md shows trains what one device trains."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support import zoo
from tests.support.requests import request_for
from trainkit.cluster.tasks import Identity
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext, Strategy
from trainkit.strategies.one_device import OneDevice

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-strategy.md"


@dataclass
class At:
    step: int = 0


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> type[Strategy]:
    """The class of the page."""
    found = re.search(r"```python\n(# trainkit/strategies/my_strategy.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    module = ModuleType("my_strategy")
    monkeypatch.setitem(sys.modules, "my_strategy", module)
    exec(compile(found[1], str(PAGE), "exec"), module.__dict__)
    made: type[Strategy] = module.MyStrategy
    return made


def trained(strategy: Strategy) -> dict[str, Tensor]:
    """The state after one step."""
    torch.manual_seed(3)
    request = request_for(
        zoo.Net(width=8),
        identity=Identity.solo("cpu"),
        precision=Precision(value="fp64"),
        make_optimizer=lambda params: torch.optim.SGD(list(params.values()), lr=0.1),
    )
    executor = strategy.setup(request)
    ticket = next(executor.tickets(At()))
    points = zoo.Points()
    batch = tuple(part[: len(ticket.shards) * 8] for part in points.tensors())
    executor.step(ticket, [(batch[0].double(), batch[1])])
    found = {name: tensor.clone() for name, tensor in executor.state_dict().items()}
    executor.close()
    return found


def test_the_documented_strategy_is_the_training_of_one_device(documented: type[Strategy]) -> None:
    strategy = documented(replicas=1)  # type: ignore[call-arg]
    assert strategy.validate(PlanContext()) == []
    assert [str(task) for task in documented(replicas=2).tasks(PlanContext())] == ["worker:0", "worker:1"]  # type: ignore[call-arg]
    found, expected = trained(strategy), trained(OneDevice())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
