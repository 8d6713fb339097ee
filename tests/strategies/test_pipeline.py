"""A plan that counts too few microbatches in flight on a rank, or a cut that runs backwards, is caught here alone.

Pipelines before anything starts: how models are cut, and what is refused.
"""

from __future__ import annotations

from contextlib import nullcontext as no_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import TrainingError
from trainkit.models.gpt import Gpt
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.pipeline.schedules import ScheduleName, ideal_bubble, most_in_flight, padded_microbatches
from trainkit.strategies.pipeline.stage_assignment import blocks_to_cut
from trainkit.strategies.pipeline.strategy import Pipeline
from trainkit.strategies.pipeline.tracing.program import TensorMeta
from trainkit.strategies.pipeline.tracing.trace import trace

TOKENS = (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def refusals(strategy: Pipeline, model: nn.Module, sample: Any = None, **facts: Any) -> list[str]:
    known = PlanContext(sample=sample, **facts)
    found = [*strategy.validate(known), *strategy.access_problems(known)]
    return [str(problem) for problem in found or strategy.validate_model(model, known)]


def stages(strategy: Pipeline, model: nn.Module, sample: Any = None) -> list[str]:
    assert refusals(strategy, model, sample) == []
    return [part.modules for part in strategy.describe_partition(model, PlanContext(sample=sample))]


def test_auto_fills_every_stage_with_runs_of_blocks_balanced_by_bytes() -> None:
    assert stages(Pipeline(stages=2), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]
    alone = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert stages(Pipeline(stages=3, schedule="interleaved"), gpt(), TOKENS) == alone


def test_a_map_names_blocks_with_their_stages_and_tied_weights_may_be_on_two() -> None:
    given = {"embed": 0, "blocks.0-1": 0, "rest": 1}
    assert stages(Pipeline(map=given), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]


MAPS: list[tuple[dict[str, int | str], str, str]] = [
    ({"embed": 0, "rest": 2}, "map.rest=2", "no such stage: there are 0 to 1"),
    ({"rest": 0}, "map", "no block on stage 1 of 2"),
    ({"embed": 0, "blocks.0": 0, "head": 1}, "map", "Add blocks.1: STAGE"),
    ({"blocks.1": 1, "rest": 0}, "map", "2 times, and 1 would suffice"),
    ({"embed": 1, "rest": 0}, "map", "use {embed:0,blocks.0-1:0,blocks.2-3:1,head:1}"),
    ({}, "map={}", "places nothing"),
]
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    *(({"map": given}, {}, f"strategy.{key}", word) for given, key, word in MAPS),
    ({"schedule": "gpipe", "virtual_stages": 2}, {}, "strategy.virtual_stages=2", "one stage per rank"),
    ({"schedule": "interleaved", "virtual_stages": 1}, {}, "strategy.virtual_stages=1", "interleaves nothing"),
    ({}, {"numerics": Numerics(reproducible=True)}, "numerics.reproducible=true", "does not work with"),
    ({}, {"objective": ModelComputesLoss()}, "objective=ModelComputesLoss", "runs the model itself"),
    ({"stages": 4}, {"num_gpus": 3}, "strategy.replicas=1", "needs 4 devices, and this host has 3 GPUs"),
    ({"stages": 7}, {}, "strategy.stages=7", "the model has 6 blocks"),
    ({"max_memory": {"2": 3}}, {}, "strategy.max_memory.2=3", "no such rank"),
    ({"max_memory": {"1": 0}}, {}, "strategy.max_memory.1=0", "more than 0"),
    ({"max_memory": {"1": 1e-9}, "map": {"head": 1, "rest": 0}}, {}, "strategy.max_memory={1:1e-09}", "7.15e-07 GiB"),
]


def test_maps_and_settings_that_do_not_go_together_are_refused() -> None:
    for settings, facts, key, word in SETTINGS:
        (said,) = refusals(Pipeline(**settings), gpt(), **facts)
        assert said.startswith(f"{key}: ")
        assert word in said


class Branches(nn.Module):
    """Blocks beside each other, code between them, and a tensor of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = self.left(inputs * self.scale), self.right(inputs)
        outputs: Tensor = self.join(left * right + inputs)
        return outputs


def test_what_a_model_does_is_written_down_and_cut_where_its_values_pass() -> None:
    model = Branches()
    program = trace(model, blocks_to_cut(model), torch.zeros(2, 4), device=torch.device("cpu"), autocast=no_context())
    assert program.blocks() == ["left", "right", "join"]
    first, second, third = program.cut({"left": 0, "right": 1, "join": 2}, 3)
    left, right = first.sent[0], second.sent[-1]
    assert (first.sent, second.received, second.held()) == ((left,), (left,), set())
    assert first.held() == {"scale"}
    assert len(third.received) == 1  # left * right + inputs runs after `right`, on its stage
    assert right == third.received[0]


class Backwards(nn.Module):
    """Its head is declared first and runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.neck = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.neck(self.body(inputs)))
        return outputs


class Twice(Backwards):
    """A block that runs twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(self.neck(self.body(inputs))))
        return outputs


class Borrowed(nn.Module):
    """The last step uses the weight of the first block, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(self.second(self.first(inputs)), self.first.weight)


class Numbers(Backwards):
    """What it does depends on its numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        outputs: Tensor = self.head(self.neck(hidden) if hidden.sum() > 0 else hidden)
        return outputs


SAMPLE = (torch.zeros(4), 0)


@pytest.mark.parametrize(("model", "given", "said"), [
    (Backwards(), {"head": 0, "rest": 1}, "use {body:0,neck:1,head:1}"),
    (Twice(), {"body": 0, "neck": 1, "head": 1}, "the model runs body more than once"),
    (Borrowed(), "auto", "the model's own code uses first.weight on stage 1"),
    (Numbers(), "auto", "model: cannot be cut into stages: "),
])  # fmt: skip
def test_what_a_model_does_must_fit_its_stages(model: nn.Module, given: Any, said: str) -> None:
    (found,) = refusals(Pipeline(map=given), model.to("meta"), SAMPLE)
    assert said in found


def test_auto_goes_by_the_order_in_which_blocks_run_and_keeps_calls_of_one_block_together() -> None:
    assert stages(Pipeline(), Backwards().to("meta"), SAMPLE) == ["body", "neck, head"]
    assert stages(Pipeline(), Twice().to("meta"), SAMPLE) == ["body, neck", "head"]


def test_a_tensor_of_another_shape_than_the_trace_says_is_not_sent() -> None:
    with pytest.raises(TrainingError, match=r"a stage has computed \(3, 4\) torch.float32 instead of \(2, 4\)"):
        TensorMeta((2, 4), torch.float32).check(torch.zeros(3, 4))


def test_a_stage_that_begins_by_writing_into_what_it_receives_gets_a_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    program = trace(model, blocks_to_cut(model), torch.zeros(2, 4), device=torch.device("cpu"), autocast=no_context())
    _, second = program.cut({"0": 0, "1": 1, "2": 1}, 2)
    assert second.copied == frozenset(second.received)


def test_a_microbatch_that_is_missing_is_filled_up_by_those_schedules_alone_that_need_it() -> None:
    assert [padded_microbatches("1f1b", count, 4) for count in (1, 3, 4, 7)] == [1, 3, 4, 7]
    assert [padded_microbatches("interleaved", count, 4) for count in (1, 3, 4, 7, 9)] == [1, 3, 4, 7, 10]
    assert ideal_bubble("gpipe", 4, num_ranks=4, stages_a_rank=1) == pytest.approx(3 / 7)
    assert ideal_bubble("interleaved", 4, num_ranks=4, stages_a_rank=2) == pytest.approx(3 / 11)
    assert ideal_bubble("zero_bubble", 4, num_ranks=4, stages_a_rank=2) == pytest.approx(3 / 27)


def test_the_plan_counts_the_microbatches_whose_activations_a_rank_holds() -> None:
    def held(schedule: ScheduleName, count: int, stages_a_rank: int = 1) -> list[int]:
        sizes = {"num_ranks": 4, "stages_a_rank": stages_a_rank}
        return [most_in_flight(schedule, count, place=place, **sizes) for place in range(4)]

    assert held("gpipe", 8) == [8] * 4
    assert (held("1f1b", 8), held("1f1b", 3)) == ([4, 3, 2, 1], [3] * 4)
    assert (held("interleaved", 8, 2), held("interleaved", 2, 2)) == ([6, 5, 4, 3], [2] * 4)
