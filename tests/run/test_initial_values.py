"""A rank that starts with other values than rank 0, or without those of a tensor that is not sent, is caught here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainkit import api
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.planning.build import model_of_rank
from trainkit.run.planning.memory import refuse_small_host
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.tensors.layouts import replace_tensors
from trainkit.trained.build import meta_model


class Scores(nn.Sequential):
    """Ten scores of an image of the digits."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        if kind == "read":
            self.rate = torch.linspace(0, 0.3, 4)[1].item()
        elif kind == "attribute":
            self.scale = torch.rand(10)
        elif kind == "caught":  # torch leaves out its base where an operation is not implemented
            nn.utils.parametrizations.orthogonal(self[1])


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    with allow_packages(["tests"]):
        yield


def planned(kind: str, strategy: str = "fsdp") -> RunPlan:
    cfg = api.compose(["recipe=digits", f"strategy={strategy}", "strategy.replicas=2"]).cfg
    return make_plan(replace(cfg, model={"_target_": f"{__name__}.Scores", "kind": kind}))


@pytest.mark.parametrize("kind", ["plain", "read", "attribute", "caught"])
def test_a_rank_builds_without_data_only_what_rank_0_can_send(kind: str) -> None:
    plan = planned(kind)
    first, second = (model_of_rank(plan.cfg, plan.components.strategy, rank) for rank in (0, 1))
    assert {tensor.is_meta for tensor in second.parameters()} == {kind == "plain"}
    assert list(first.state_dict()) == list(second.state_dict())
    noted = any("is built whole on every rank" in note for note in model_notes(plan, meta_model(plan.cfg)))
    assert noted == (kind != "plain")


def test_a_model_larger_than_the_host_of_rank_0_is_refused_where_it_is_sent() -> None:
    refuse_small_host(plan := planned("plain"), model := meta_model(plan.cfg), 4 * 650)
    refuse_small_host(planned("plain", "mirrored"), model, 4 * 650 - 1)
    refused = r"Scores: rank 0 builds it whole: 2.54 KiB, and the memory of the host is 2 KiB. Use a host with more"
    with pytest.raises(ConfigError, match=refused):
        refuse_small_host(plan, model, 2048)


def test_tied_parameters_and_those_in_the_list_of_a_recurrent_layer_get_memory_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3))
    model[1].weight = model[0].weight
    replace_tensors(model, lambda tensor: torch.zeros_like(tensor, device="cpu"))
    assert model[1].weight is model[0].weight
    output, _ = model[2](torch.ones(1, 3))
    assert output.tolist() == [[0.0, 0.0, 0.0]]
