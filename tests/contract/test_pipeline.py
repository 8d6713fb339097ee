"""A pipeline is the training of one device: every schedule, over stages and replicas, and models of users or a refusal.

A microbatch whose gradient a schedule loses, a tied weight whose two stages are not summed, a Python object that a
traced stage would share between microbatches, and a GPT-2 of transformers that trace cannot cut are caught here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Trained, _Rank, refusals_of, train
from tests.support import object_models, zoo
from tests.support.pool import Member, Pool
from trainkit.errors import ConfigError
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import PlanContext
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.mesh.pipe import executor as staged
from trainkit.strategies.mesh.strategy import Pipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def deep(*, norm: bool = True, dropout: float = 0.0) -> nn.Module:
    """Five blocks with parameters; one begins by writing into what it receives."""
    middle: list[nn.Module] = [nn.BatchNorm1d(7)] if norm else []
    return zoo.fill(
        nn.Sequential(nn.Linear(6, 7), *middle, nn.ELU(inplace=True), nn.Dropout(dropout), nn.Linear(7, 7), nn.Tanh(),
                      nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    )  # fmt: skip


CLASSES = Case(strategy="pipeline", global_size=16, micro_size=4)
TOKENS = replace(CLASSES, task="tokens", global_size=8, micro_size=2)
GPT = replace(TOKENS, build=zoo.even_gpt)
MANY = replace(CLASSES, build=deep, global_size=20)
"""Five microbatches of 4 a step; the last batch of an epoch has 17 points in 4, 4, 3, 3 and 3."""


def check(case: Case, pool: Pool) -> Sequence[Trained]:
    """What the ranks ended with, held to the reference."""
    return assert_reference(train(pool, case), case)


# the schedule ends where the optimizer begins: one schedule with SGD, and all with AdamW
@pytest.mark.parametrize(("optimizer", "schedule"), [("sgd", "1f1b"), *(("adamw", schedule) for schedule in SCHEDULES)])
@pytest.mark.slow
def test_branches_and_tied_weights_on_two_stages_train_as_the_reference(
    optimizer: str, schedule: str, pool: Pool
) -> None:
    ranks = check(replace(TOKENS, optimizer=optimizer, settings={"schedule": schedule}, max_norm=0.05), pool)
    assert min(ranks[0].norms) > 0.05


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_statistics_and_repeats_that_count_nothing_are_those_of_the_reference(schedule: str, pool: Pool) -> None:
    check(replace(MANY, settings={"schedule": schedule}), pool)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_four_stages_train_as_the_reference(schedule: str, pool: Pool) -> None:
    check(replace(MANY, settings={"schedule": schedule, "stages": 4}, max_norm=0.1), pool)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_replicas_of_two_stages_train_as_the_reference(schedule: str, pool: Pool) -> None:
    case = replace(TOKENS, settings={"schedule": schedule, "replicas": 2}, optimizer="adamw", max_norm=0.05)
    check(case, pool)


class Block(nn.Module):
    """A layer, whose weight gradients torch cannot separate from those of its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.norm = kind, nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale, self.shift = nn.Parameter(torch.empty(6)), nn.Parameter(torch.empty(6))

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, 6) -> (samples, 6)."""
        if self.kind == "twice":
            inputs = self.norm(inputs)
        outputs = self.linear(inputs.detach() if self.kind == "detached" else inputs)
        if self.kind == "summed":
            outputs = outputs * (self.scale + self.shift.sum())
        normed: Tensor = self.norm(outputs)
        return normed[:, None][:, 0] if self.kind == "view" else normed


def in_blocks(kind: str) -> nn.Module:
    """Three equal blocks, each on its own stage: one receives and sends."""
    return zoo.fill(nn.Sequential(*(Block(kind) for _ in range(3)), nn.Linear(6, 3)))


@pytest.mark.parametrize("kind", ["twice", "detached", "summed", "view"])
def test_a_split_backward_pass_gives_each_weight_its_gradient_once(kind: str, pool: Pool) -> None:
    # a weight used twice, one that the stage's input does not reach, a gradient without memory of its own, and a stage
    # whose output is a view
    settings = {"stages": 3, "schedule": "zero_bubble"}
    check(replace(CLASSES, build=in_blocks, model={"kind": kind}, settings=settings, num_steps=4), pool)


def test_microbatches_of_unequal_sizes_train_as_the_reference(pool: Pool) -> None:
    # 11 points are 4, 4 and 3; the last batch of an epoch has 4
    check(replace(CLASSES, global_size=11, optimizer="adamw"), pool)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_replica_without_a_shard_in_a_short_batch_takes_part(schedule: str, pool: Pool) -> None:
    # the last batch of an epoch has 5 of 16 points: one shard of them
    settings = {"replicas": 2, "schedule": schedule}
    ranks = check(replace(MANY, global_size=16, micro_size=8, settings=settings, resume_at=2), pool)
    assert [len(rank.samples[2]) for rank in ranks] == [5, 0, 0, 0]


def exchanges_of_the_last_step(member: Member, case: Case) -> dict[str, int]:
    """All-reduces while autograd computes, in a backward pass or after it, and after all backward passes."""
    calls = {"inside": 0, "beside": 0, "after": 0}
    rank, all_reduce, current = _Rank(member, case), dist.all_reduce, [""]
    rank.on_phase = lambda phase, _step: current.__setitem__(0, phase)

    def count(tensor: Tensor, **options: Any) -> Any:
        inside = "inside" if torch._C._current_graph_task_id() >= 0 else "beside"
        calls["after" if current[0] == "reduce" else inside] += 1
        return all_reduce(tensor, **options)

    with patch.object(staged, "BUCKET_BYTES", 1):
        executor = rank.setup(0)
        rank.steps(executor, 1)
        with patch.object(dist, "all_reduce", count):
            rank.steps(executor, 2)
    executor.close()
    return calls


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_gradients_are_exchanged_inside_of_the_last_backward_pass(schedule: str, pool: Pool) -> None:
    # eight parameters in buckets of one, four on either rank; five shards, the last ones of another size
    settings = {"schedule": schedule, "replicas": 2}
    case = replace(MANY, model={"norm": False}, global_size=19, num_steps=2, settings=settings)
    calls = pool.run("tests.contract.test_pipeline.exchanges_of_the_last_step", case, num_ranks=4)
    assert calls == [{"inside": 4, "beside": 0, "after": 0}] * 4


@pytest.mark.parametrize("settings", [{"stages": 4}, {"schedule": "interleaved"}])
@pytest.mark.slow
def test_a_gpt_with_tied_ends_trains_as_the_reference(settings: dict[str, Any], pool: Pool) -> None:
    check(replace(GPT, settings=settings, max_norm=0.1, resume_at=4), pool)


BASES = {
    "dropout": replace(MANY, model={"dropout": 0.4}, precision="fp32"),
    "masters": replace(MANY, precision="bf16", optimizer="adamw"),
    "mixed": replace(MANY, precision="bf16_mixed", model={"dropout": 0.4}),
    "scaled": replace(CLASSES, precision="fp16_mixed", rate_scale=0.1),
}


@pytest.mark.parametrize(("base", "schedule"), [*zip(BASES, ("gpipe", "1f1b", "gpipe", "1f1b"), strict=True)])
@pytest.mark.slow
def test_its_bits_are_those_of_one_device(base: str, schedule: str, pool: Pool) -> None:
    assert_bits(train(pool, replace(BASES[base], settings={"schedule": schedule})), alone(BASES[base]))


def test_a_gpt_draws_what_it_draws_on_one_device(pool: Pool) -> None:
    base = replace(GPT, model={"dropout": 0.3})  # its tied weight is summed in another order
    assert_close(train(pool, replace(base, settings={"stages": 4, "schedule": "zero_bubble"})), alone(base))


class Loud(zoo.Points):
    """Points whose gradients overflow at the first loss scale, on the first stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = self.inputs * 512


def quieted() -> nn.Module:
    """Two layers; the first takes loud inputs down."""
    model = zoo.fill(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)))
    with torch.no_grad():
        next(model.parameters()).mul_(1 / 512)
    return model


def test_an_overflow_on_one_stage_is_tried_again_by_all(pool: Pool) -> None:
    base = replace(CLASSES, build=quieted, samples=Loud, precision="fp16_mixed", rate_scale=1e-6, num_steps=4)
    ranks = assert_bits(train(pool, replace(base, settings={"schedule": "zero_bubble"})), alone(base))
    assert ranks[0].scale < 65536


def drift(member: Member, case: Case) -> str | None:
    """What the check of replicas says once one of them has gone its own way."""
    rank = _Rank(member, case)
    executor = rank.setup(0)
    try:
        assert executor.check_replicas() is None
        assert isinstance(executor.local, Replica)
        if member.rank == 3:
            with torch.no_grad():
                next(iter(executor.local.params.values())).add_(1.0)
        return executor.check_replicas()
    finally:
        executor.close()


def test_a_stage_that_differs_between_replicas_is_named(pool: Pool) -> None:
    case = replace(CLASSES, settings={"replicas": 2})
    texts = pool.run("tests.contract.test_pipeline.drift", case, num_ranks=4)
    assert set(texts) == {"the parameter 2.weight differs on rank 3 from rank 1, which holds the same part of it."}


def params_of(member: Member, case: Case) -> tuple[list[str], list[str]]:
    """The parameters that have numbers on this rank, and the parameters that it writes."""
    rank = _Rank(member, case)
    executor = rank.setup(0)
    try:
        materialized = [name for name, param in executor.local.model.named_parameters() if not param.is_meta]
        return materialized, list(executor.sharded_state_dict())
    finally:
        executor.close()


def test_a_rank_holds_its_stage_and_writes_what_no_other_does(pool: Pool) -> None:
    stage_map = {"embed": 0, "rest": 1}
    first, second, *others = pool.run(
        "tests.contract.test_pipeline.params_of",
        replace(TOKENS, settings={"map": stage_map, "replicas": 2}),
        num_ranks=4,
    )
    assert first == (["embed.weight"], ["param/embed.weight"])
    inner = [f"{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")]
    assert second[0] == ["embed.weight", *inner]
    assert second[1] == [f"param/{name}" for name in inner]
    assert [pieces for _, pieces in others] == [[], []]


@pytest.mark.slow
def test_a_run_evaluates_and_saves_what_one_device_does(tmp_path: Path) -> None:
    fixed = ("model=net", "model.dropout=0.2", "data=points", "batch.global_size=16", "batch.micro_size=4",
             "optimizer=adamw", "steps=4")  # fmt: skip
    expected = run(tmp_path / "one", *fixed)
    result = run(tmp_path / "two", *fixed, "strategy=pipeline", "strategy.map={0-1:0,rest:1}")
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["metrics"] == expected["metrics"]
    assert result["fingerprint"] == expected["fingerprint"]


POINT = (torch.zeros(6), 0)


UNTIDY = Case(strategy="pipeline", global_size=11, micro_size=4)


@pytest.mark.parametrize("named", object_models.EQUAL)
def test_fresh_containers_modes_and_blocks_own_counts_train_to_the_bits_of_one_device(named: str, pool: Pool) -> None:
    # 11 points are 4, 4 and 3: two shapes. In bf16_mixed the autocast that a model turns off itself shows.
    precision = "bf16_mixed" if named == "FullPrecision" else "fp64"
    case = replace(UNTIDY, build=object_models.EQUAL[named], precision=precision)
    expected = alone(case)
    assert [rank.losses for rank in assert_bits(train(pool, case), expected)] == [expected.losses] * 2


REFUSED = {
    "ObjectBetweenBlocks": "the block first changes the tests.Notes among its arguments, of which each stage has",
    "ListBetweenBlocks": "the block first changes the list among its arguments",
    "DictBetweenBlocks": "the block first changes the dict among its arguments",
    "CacheBetweenBlocks": "the block first changes the list among its arguments",
    "ObjectReturned": "the block first returns an object of the class tests.Notes, which is not sent to other stages.",
    "Counting": "its own code changes calls (int), and every stage runs that code. Compute it from the inputs",
    "CountingOutside": "its own code after first does something else in each pass, or where that block is on another",
    "Remembering": "its own code changes last (Tensor), and every stage runs that code.",
    "Tossing": "its forward draws from Python's random or NumPy, which are keyed by shard and not by block.",
    "OwnGenerator": "its own code gives aten.randn.generator a torch.Generator, which each stage would have",
    "Averaging": "its own code writes into mean between its blocks. Move the tensor and that code into a block",
    "ReadingAttribute": "its own code needs what a block does beside what it returns (AssertionError).",
    "SharingAList": "second.seen (list) of the block second is changed outside of the block. Pass it as an argument",
}
REMEDIES = {"CacheBetweenBlocks": "Use model.config.use_cache=false.", "Tossing": "Use strategy=fsdp."}


@pytest.mark.parametrize("named", REFUSED)
def test_what_a_pass_leaves_in_python_objects_is_refused_with_a_remedy(named: str) -> None:
    model = object_models.REFUSED[named]().to("meta")
    (problem,) = Pipeline().validate_model(model, PlanContext(sample=POINT))
    assert str(problem).startswith(f"model: cannot be cut into stages: {REFUSED[named]}")
    assert str(problem).endswith(REMEDIES.get(named, "or use strategy=mirrored."))


def test_looking_at_a_model_leaves_its_attributes_and_all_generators_as_they_were() -> None:
    model: Any = object_models.BlockThatCounts()
    state = torch.get_rng_state()
    assert Pipeline().validate_model(model, PlanContext(sample=POINT)) == []
    assert (model.first.calls, model.first.sizes) == (0, [0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_of_such_a_model_ends_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the block first changes the tests\.Notes among its arguments"):
        run(
            tmp_path / "run",
            "model._target_=tests.support.object_models.ObjectBetweenBlocks",
            *("model=net", "~model.width", "~model.norm", "~model.dropout"),
            *("data=points", "strategy=pipeline", "steps=2"),
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_attribute_that_a_callback_changes_counts_from_the_next_step_on(tmp_path: Path) -> None:
    common = (
        "model._target_=tests.support.object_models.Tempered",
        *("model=net", "~model.width", "~model.norm", "~model.dropout", "data=points", "steps=6"),
        *("batch.global_size=16", "batch.micro_size=4"),
        "callbacks.annealing._target_=tests.support.object_models.Annealing",
    )
    plain, staged = (weights(run(tmp_path / name, *common, f"strategy={name}")) for name in ("one_device", "pipeline"))
    torch.testing.assert_close(staged, plain, rtol=1e-12, atol=1e-13)


SENTENCE = (torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize(
    ("stage_map", "stages"),
    [
        (
            "auto",
            ["transformer.wte, transformer.wpe, transformer.h.0-1", "transformer.h.2-3, transformer.ln_f, lm_head"],
        ),
        (
            {"transformer": 0, "transformer.h.3": 1, "lm_head": 1},
            ["transformer.wte, transformer.wpe, transformer.h.0-2", "transformer.h.3, transformer.ln_f, lm_head"],
        ),
    ],
)
@pytest.mark.slow
def test_a_decoder_of_one_child_is_cut_by_auto_and_by_a_layer_named_beside_its_parent(
    stage_map: Any, stages: list[str], pool: Pool
) -> None:
    strategy = Pipeline(map=stage_map)
    model, facts = object_models.Decoder().to("meta"), PlanContext(sample=SENTENCE)
    assert strategy.validate_model(model, facts) == []
    assert [part.modules for part in strategy.describe_partition(model, facts)] == stages
    decided = strategy.resolve(lambda: model, facts).map
    decoding = replace(UNTIDY, task="tokens", build=object_models.Decoder, global_size=8, micro_size=2)
    case = replace(decoding, settings={"map": decided}, resume_at=4)
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize("places", [{"transformer.h.1": 1, "rest": 0}, {"lm_head": 0, "transformer.h": 1, "rest": 0}])
def test_the_map_that_is_advised_is_balanced_and_taken(places: Any) -> None:
    model, facts = object_models.Decoder().to("meta"), PlanContext(sample=SENTENCE)
    (problem,) = Pipeline(map=places).validate_model(model, facts)
    advised = problem.rule.partition("A pipeline runs forwards: use {")[2].removesuffix("}.")
    assert advised == (
        "transformer.wte:0,transformer.wpe:0,transformer.h.0-1:0,transformer.h.2-3:1,transformer.ln_f:1,lm_head:1"
    )
    pasted = {name: int(stage) for name, _, stage in (pair.rpartition(":") for pair in advised.split(","))}
    assert Pipeline(map=pasted).validate_model(model, facts) == []


def gpt2(**settings: Any) -> nn.Module:
    """Four layers, as `transformers.AutoModelForCausalLM.from_config` makes them."""
    from transformers import AutoModelForCausalLM, GPT2Config  # slow: only the tests of this file pay for it

    sizes = {"vocab_size": zoo.TOKENS, "n_positions": zoo.LENGTH, "n_embd": 8, "n_layer": 4, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **settings)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class Scores(nn.Module):
    """A user's own module around a decoder of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(samples, length) int64 -> (samples, length, tokens)."""
        scores: torch.Tensor = self.inner(tokens).logits
        return scores


def refusals(model: nn.Module) -> list[str]:
    return [str(problem) for problem in Pipeline().validate_model(model.to("meta"), PlanContext(sample=SENTENCE))]


@pytest.mark.slow
def test_a_cache_of_keys_and_values_is_refused_with_the_key_that_turns_it_off() -> None:
    refused = (
        "model: cannot be cut into stages: the block {} changes the transformers.DynamicLayer among its arguments, of "
        "which each stage has its own. Use {}."
    )
    assert refusals(gpt2()) == [refused.format("transformer.h.0", "model.config.use_cache=false")]
    within = "config.use_cache=false of model.inner"
    assert refusals(Scores(gpt2())) == [refused.format("inner.transformer.h.0", within)]


def filled(*, use_cache: bool = False) -> nn.Module:
    """GPT-2 with dropout; its weights by formula."""
    return zoo.fill(gpt2(use_cache=use_cache, attn_pdrop=0.0))


GPT2 = Case(task="tokens", build=filled)


@pytest.mark.slow
def test_shards_refuse_the_cache_with_the_key_that_turns_it_off(pool: Pool) -> None:
    pytest.importorskip("transformers")
    settings = {"replicas": 2, "wrap": ["GPT2Block"]}
    (text,) = refusals_of(pool, replace(GPT2, model={"use_cache": True}, strategy="fsdp", settings=settings))
    assert text.endswith("dataclasses. Return what it adds, or use model.config.use_cache=false.")


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.slow
def test_it_trains_in_stages_of_auto_as_on_one_device(stages: int, pool: Pool) -> None:
    model, facts = gpt2(use_cache=False).to("meta"), PlanContext(sample=SENTENCE, objective=LanguageModelling())
    strategy = Pipeline(stages=stages)
    assert strategy.validate_model(model, facts) == []
    decided = strategy.resolve(lambda: model, facts).map
    settings = {"map": decided, "stages": stages}
    case = replace(GPT2, micro_size=2, settings=settings, strategy="pipeline")
    assert_close(train(pool, case), alone(case))
