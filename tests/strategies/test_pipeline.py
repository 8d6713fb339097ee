"""Pipelines before anything starts: how models are cut, and every mistake in its exact words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext as no_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import TrainingError
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.models.resnet import ResNet
from trainkit.objectives.classification import Classification
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.capabilities import access_problems
from trainkit.strategies.pipeline import Pipeline
from trainkit.strategies.pipeline.schedules import ideal_bubble, padded_microbatches
from trainkit.strategies.pipeline.stage_assignment import blocks_to_cut
from trainkit.strategies.pipeline.tracing.program import TensorMeta
from trainkit.strategies.pipeline.tracing.trace import trace

TOKENS = (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def refusals(strategy: Pipeline, model: nn.Module, sample: Any = None, **facts: Any) -> list[str]:
    known = PlanContext(sample=sample, **facts)
    found = [*strategy.validate(known), *access_problems(strategy, known)]
    return [str(problem) for problem in found or strategy.validate_model(model, known)]


def stages(strategy: Pipeline, model: nn.Module, sample: Any = None) -> list[str]:
    assert refusals(strategy, model, sample) == []
    return [part.modules for part in strategy.describe_partition(model, PlanContext(sample=sample))]


def test_auto_fills_every_stage_with_runs_of_blocks_balanced_by_bytes() -> None:
    assert stages(Pipeline(stages=2), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]
    assert stages(Pipeline(stages=3, schedule="interleaved"), gpt(), TOKENS) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
        "head",
    ]


def test_a_map_names_blocks_with_their_stages_and_tied_weights_may_be_on_two() -> None:
    given = {"embed": 0, "blocks.0-1": 0, "rest": 1}
    assert stages(Pipeline(map=given), gpt(), TOKENS) == ["embed, blocks.0-1", "blocks.2-3, head"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"embd": 0, "rest": 1}, "strategy.map.embd=0: no such module. Did you mean embed?"),
        ({"embed": 0, "rest": 2}, "strategy.map.rest=2: no such stage: there are 0 to 1."),
        ({"embed": 0, "rest": "cpu"}, "strategy.map.rest=cpu: no such stage: there are 0 to 1."),
        ({"rest": 0}, "strategy.map: puts no block on stage 1 of 2. Every stage needs a block."),
        (
            {"embed": 0, "blocks.0": 0, "head": 1},
            (
                "strategy.map: no stage for blocks.1.attention_norm.weight, "
                "blocks.1.attention.queries_keys_values.weight, "
                "blocks.1.attention.project.weight, blocks.1.mlp_norm.weight, blocks.1.mlp.expand.weight and 13 more. "
                "Add blocks.1: STAGE, or rest: STAGE."
            ),
        ),
        (
            {"blocks.1": 1, "rest": 0},
            (
                "strategy.map: goes back from stage 1 (blocks.1) to stage 0 (blocks.2); activations change "
                "their stage 2 times, and 1 would suffice. A pipeline runs forwards: use "
                "{embed:0,blocks.0-1:0,blocks.2-3:1,head:1}."
            ),
        ),
        (
            {"embed": 1, "rest": 0},
            (
                "strategy.map: goes back from stage 1 (embed) to stage 0 (blocks.0); activations change "
                "their stage 1 time, and 1 would suffice. A pipeline runs forwards: use "
                "{embed:0,blocks.0-1:0,blocks.2-3:1,head:1}."
            ),
        ),
        ({}, "strategy.map={}: places nothing. Name modules and their stages, {embed:0,rest:1}, or use auto."),
    ],
)
def test_a_bad_map_is_refused(given: dict[str, int | str], said: str) -> None:
    assert refusals(Pipeline(map=given), gpt()) == [said]


@pytest.mark.parametrize(
    ("settings", "facts", "said"),
    [
        (
            {"schedule": "gpipe", "virtual_stages": 2},
            {},
            "strategy.virtual_stages=2: schedule=gpipe has one stage per rank. Use interleaved, or leave it out.",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 1},
            {},
            "strategy.virtual_stages=1: interleaves nothing. Use 2 or more, or schedule=1f1b.",
        ),
        (
            {},
            {"numerics": Numerics(reproducible=True)},
            (
                "numerics.reproducible=true: does not work with strategy=pipeline, which sums in its own order. Leave "
                "it out."
            ),
        ),
        (
            {},
            {"objective": ModelComputesLoss()},
            (
                "objective=ModelComputesLoss: runs the model itself, and a pipeline has outputs on its last stage "
                "only. Use a Supervised objective that keeps the default `loss`."
            ),
        ),
        (
            {"stages": 4},
            {"num_gpus": 3},
            "strategy.replicas=1: 1 replica of 4 ranks needs 4 devices, and this host has 3 GPUs.",
        ),
        (
            {"stages": 7},
            {},
            "strategy.stages=7: the model has 6 blocks with parameters to train. Use 6 stages or fewer in all.",
        ),
        (
            {"max_memory": {"2": 3}},
            {},
            "strategy.max_memory.2=3: no such rank: there are 0 to 1.",
        ),
        (
            {"max_memory": {"1": 0}},
            {},
            "strategy.max_memory.1=0: must be more than 0.",
        ),
        (
            {"max_memory": {"1": 1e-9}, "map": {"head": 1, "rest": 0}},
            {},
            (
                "strategy.max_memory={1:1e-09}: rank 1 takes 1e-09 GiB, and its stages hold 7.15e-07 GiB of "
                "parameters, gradients and buffers. Use more stages, or activation_checkpointing=full."
            ),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: Any, facts: Any, said: str) -> None:
    assert refusals(Pipeline(**settings), gpt(), **facts) == [said]


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


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (
            Backwards(),
            {"head": 0, "rest": 1},
            (
                "strategy.map: goes back from stage 1 (neck) to stage 0 (head); activations change their stage 1 "
                "time, and 1 would suffice. A pipeline runs forwards: use {body:0,neck:1,head:1}."
            ),
        ),
        (
            Twice(),
            {"body": 0, "neck": 1, "head": 1},
            (
                "strategy.map: goes back from stage 1 (neck) to stage 0 (body), and the model runs body more than "
                "once. Put all blocks between its calls on its stage. Use {body:0,neck:0,head:1}."
            ),
        ),
        (
            Borrowed(),
            "auto",
            (
                "strategy.map: the model's own code uses first.weight on stage 1, and its block is on stage 0. Put the "
                "blocks between them on one stage."
            ),
        ),
    ],
)
def test_what_a_model_does_must_fit_its_stages(model: nn.Module, given: Any, said: str) -> None:
    sample = (torch.zeros(4), 0)
    assert refusals(Pipeline(map=given), model.to("meta"), sample) == [said]


def test_auto_goes_by_the_order_in_which_blocks_run_and_keeps_calls_of_one_block_together() -> None:
    sample = (torch.zeros(4), 0)
    assert stages(Pipeline(), Backwards().to("meta"), sample) == ["body", "neck, head"]
    assert stages(Pipeline(), Twice().to("meta"), sample) == ["body, neck", "head"]


def test_a_model_that_looks_at_its_numbers_cannot_be_cut() -> None:
    (said,) = refusals(Pipeline(map="auto"), Numbers().to("meta"), (torch.zeros(4), 0))
    assert said.startswith("model: cannot be cut into stages: ")
    assert said.endswith(". Use strategy=fsdp.")


def test_a_tensor_of_another_shape_than_the_trace_says_is_not_sent() -> None:
    said = (
        "a stage has computed (3, 4) torch.float32 instead of (2, 4) torch.float32 as traced: a block behaves "
        "differently from its trace. Use strategy=mirrored."
    )
    with pytest.raises(TrainingError, match="a stage has computed") as caught:
        TensorMeta((2, 4), torch.float32).check(torch.zeros(3, 4))
    assert str(caught.value) == said


def test_a_stage_that_begins_by_writing_into_what_it_receives_gets_a_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    program = trace(model, blocks_to_cut(model), torch.zeros(2, 4), device=torch.device("cpu"), autocast=no_context())
    _, second = program.cut({"0": 0, "1": 1, "2": 1}, 2)
    assert second.copied == frozenset(second.received)


@pytest.mark.parametrize(
    "model", [ResNet(depth=18, num_classes=3), Mlp(in_features=768, hidden=[8, 8], out_features=3)]
)
@pytest.mark.slow
def test_models_of_ours_are_cut_without_a_hint(model: nn.Module) -> None:
    assert len(stages(Pipeline(stages=2), model.to("meta"), (torch.zeros(3, 16, 16), 0))) == 2


def test_a_microbatch_that_is_missing_is_filled_up_by_those_schedules_alone_that_need_it() -> None:
    assert [padded_microbatches("1f1b", count, 4) for count in (1, 3, 4, 7)] == [1, 3, 4, 7]
    assert [padded_microbatches("interleaved", count, 4) for count in (1, 3, 4, 7, 9)] == [1, 3, 4, 7, 10]
    assert ideal_bubble("gpipe", 4, num_ranks=4, stages_a_rank=1) == pytest.approx(3 / 7)
    assert ideal_bubble("interleaved", 4, num_ranks=4, stages_a_rank=2) == pytest.approx(3 / 11)


def test_auto_weighs_what_blocks_keep_of_a_shard_for_backward() -> None:
    narrow = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False), *narrow)
    known = PlanContext(objective=Classification(), sample=(torch.zeros(8), 1), micro_size=4096)
    maps = [Pipeline(stages=2).resolve(lambda: model, facts).map for facts in (PlanContext(), known)]
    assert [list(one.values()) for one in maps if isinstance(one, Mapping)] == [
        [0, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]
