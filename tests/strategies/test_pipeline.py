"""Pipelines before anything starts: how models are cut, and what is refused; a backward pass in two parts.

A plan that counts too few microbatches in flight on a rank, a cut that runs backwards, or a gradient that is computed
twice is caught here alone.
"""

from __future__ import annotations

from contextlib import nullcontext as no_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.counting import StepTrace
from trainkit.errors import TrainingError
from trainkit.models.gpt import Gpt
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program, TensorMeta, trace
from trainkit.strategies.mesh.pipe.stages import (
    blocks_to_cut,
    ideal_bubble,
    padded_microbatches,
)
from trainkit.strategies.mesh.pipe.weights import SplitStage
from trainkit.strategies.mesh.strategy import Mesh, Pipeline

TOKENS = (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def refusals(strategy: Mesh | Pipeline, model: nn.Module, sample: Any = None, **facts: Any) -> list[str]:
    context = PlanContext(sample=sample, **facts)
    problems = [*strategy.validate(context), *strategy.access_problems(context)]
    return [str(problem) for problem in problems or strategy.validate_model(model, context)]


def stages(strategy: Pipeline, model: nn.Module, sample: Any = None) -> list[str]:
    assert refusals(strategy, model, sample) == []
    return [part.modules for part in strategy.describe_partition(model, PlanContext(sample=sample))]


@pytest.mark.slow
def test_auto_fills_every_stage_with_runs_of_blocks_balanced_by_bytes() -> None:
    assert stages(Pipeline(stages=2), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]
    alone = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert stages(Pipeline(stages=3, schedule="interleaved"), gpt(), TOKENS) == alone


def test_a_map_names_blocks_with_their_stages_and_tied_weights_may_be_on_two() -> None:
    stage_map = {"embed": 0, "blocks.0-1": 0, "rest": 1}
    assert stages(Pipeline(map=stage_map), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]


MAPS: list[tuple[dict[str, int | str], str, str]] = [
    ({"embed": 0, "rest": 2}, "map.rest=2", "no such stage: there are 0 to 1"),
    ({"rest": 0}, "map", "no block on stage 1 of 2"),
    ({"embed": 0, "blocks.0": 0, "head": 1}, "map", "Add blocks.1: STAGE"),
    ({"blocks.1": 1, "rest": 0}, "map", "2 times, and 1 would suffice"),
    ({"embed": 1, "rest": 0}, "map", "use {embed:0,blocks.0-1:0,blocks.2-3:1,head:1}"),
    ({}, "map={}", "places nothing"),
]
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    *(({"map": stage_map}, {}, f"strategy.{key}", word) for stage_map, key, word in MAPS),
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
        (message,) = refusals(Pipeline(**settings), gpt(), **facts)
        assert message.startswith(f"{key}: ")
        assert word in message
    (message,) = refusals(Mesh(pipe=7, shard=1), gpt())
    assert message.startswith("strategy.pipe=7: "), "each strategy names its own key"


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


def program_of(model: nn.Module, *shape: int) -> Program:
    units, inputs = blocks_to_cut(model), torch.zeros(shape)
    return trace(model, units, inputs, device=torch.device("cpu"), autocast=no_context())


def tensors_before(program: Program, call: int) -> list[tuple[str, tuple[int, ...]]]:
    """Where the model meets what is sent before a call, and its shape."""
    crossing = program.crossings[call]
    assert not isinstance(crossing, CannotCut)
    return [(f"{program.blocks[tensor.places[0][0]]} {tensor.places[0][1]}", tensor.meta.size) for tensor in crossing]


def test_what_later_stages_use_is_sent_where_a_block_returns_it_or_is_given_it() -> None:
    program = program_of(Branches(), 2, 4)
    assert program.blocks == ("left", "right", "join")
    assert tensors_before(program, 1) == [("left returned", (2, 4))]
    assert tensors_before(program, 2) == [("join given", (2, 4))]  # left * right + inputs runs on the stage of `right`


class Stream(nn.Module):
    """Its own code adds what each block returns to a stream, into which it writes for the last one."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        halved = stream[:, :2]
        stream = stream.mul_(2) if self.in_place else stream + 1
        stream = stream + self.second(stream)
        outputs: Tensor = self.third(stream) + halved.sum()
        return outputs


def test_code_between_blocks_computes_again_from_what_blocks_have_returned() -> None:
    assert tensors_before(program_of(Stream(in_place=False), 2, 4), 1) == [("first returned", (2, 4))]
    program = program_of(Stream(in_place=True), 2, 4)
    assert isinstance(program.crossings[1], CannotCut)  # it would write twice
    (message,) = refusals(Pipeline(map={"first": 0, "rest": 1}), Stream(in_place=True).to("meta"), SAMPLE)
    assert "cannot be cut before second: code after first and code after second use a tensor that no block" in message


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


@pytest.mark.parametrize(("model", "stage_map", "text"), [
    (Backwards(), {"head": 0, "rest": 1}, "use {body:0,neck:1,head:1}"),
    (Twice(), {"body": 0, "neck": 1, "head": 1}, "the model runs body more than once"),
    (Borrowed(), "auto", "its own code uses first.weight after second, and every stage runs that code"),
    (Numbers(), "auto", "model: cannot be cut into stages: "),
])  # fmt: skip
def test_what_a_model_does_must_fit_its_stages(model: nn.Module, stage_map: Any, text: str) -> None:
    (message,) = refusals(Pipeline(map=stage_map), model.to("meta"), SAMPLE)
    assert text in message


def test_auto_goes_by_the_order_in_which_blocks_run_and_keeps_calls_of_one_block_together() -> None:
    assert stages(Pipeline(), Backwards().to("meta"), SAMPLE) == ["body", "neck, head"]
    assert stages(Pipeline(), Twice().to("meta"), SAMPLE) == ["body, neck", "head"]


def test_a_tensor_of_another_shape_than_without_numbers_is_not_sent() -> None:
    with pytest.raises(TrainingError, match=r"a stage has computed \(3, 4\) torch.float32 instead of \(2, 4\)"):
        TensorMeta((2, 4), torch.float32).check(torch.zeros(3, 4))


def test_a_stage_that_begins_by_writing_into_what_it_receives_gets_a_copy() -> None:
    program = program_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), 2, 4)
    (received,) = program.span(1, 3).received
    assert received.is_written


def test_a_microbatch_that_is_missing_is_filled_up_by_those_schedules_alone_that_need_it() -> None:
    assert [padded_microbatches("1f1b", count, 4) for count in (1, 3, 4, 7)] == [1, 3, 4, 7]
    assert [padded_microbatches("interleaved", count, 4) for count in (1, 3, 4, 7, 9)] == [1, 3, 4, 7, 10]
    assert ideal_bubble("gpipe", 4, num_ranks=4, stages_a_rank=1) == pytest.approx(3 / 7)
    assert ideal_bubble("interleaved", 4, num_ranks=4, stages_a_rank=2) == pytest.approx(3 / 11)
    assert ideal_bubble("zero_bubble", 4, num_ranks=4, stages_a_rank=2) == pytest.approx(3 / 27)


class Stage(nn.Module):
    """Two layers, whose outputs are a number of tensors as those of a stage are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """(samples, 3) -> the same, and what has no gradient."""
        return self.layers(inputs), inputs.detach().argmax(1)


@pytest.mark.slow
def test_gradients_of_inputs_come_first_and_each_is_computed_once() -> None:
    stage, inputs = Stage(), torch.randn(2, 3, requires_grad=True)
    torch.autograd.backward(stage(inputs)[0], torch.ones(2, 3))
    assert inputs.grad is not None
    expected = [inputs.grad, *(param.grad for param in stage.parameters())]
    inputs.grad, split = None, SplitStage(stage)
    stage.zero_grad()
    outputs, indices = split(inputs)
    assert not indices.requires_grad
    with StepTrace() as first:
        torch.autograd.backward(outputs, torch.ones(2, 3))
    assert [param.grad for param in stage.parameters()] == [None] * 4
    with StepTrace() as second:
        split.weights()()
    grads = [inputs.grad, *(param.grad for param in stage.parameters())]
    assert all(map(torch.equal, grads, expected))  # type: ignore[arg-type]
    assert (first.total.names["mm"], second.total.names["mm"]) == (2, 2)


def test_of_the_first_stage_all_is_left() -> None:
    stage, inputs = Stage(), torch.randn(2, 3)
    split = SplitStage(stage)
    with StepTrace() as first:
        torch.autograd.backward(split(inputs)[0], torch.ones(2, 3))
    assert first.total.names["mm"] == 0
    split.weights()()
    assert all(param.grad is not None for param in stage.parameters())
