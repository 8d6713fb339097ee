"""A layer that float8 converts although it must stay, or a GPU without its units, is caught here alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.running import run
from tests.support.present import present
from trainkit import api
from trainkit.adapters import float8
from trainkit.adapters.float8 import Float8
from trainkit.config.identity import fingerprint
from trainkit.errors import ConfigError
from trainkit.models.gpt import Gpt
from trainkit.prove.comparing import same_training
from trainkit.prove.proving import with_precision
from trainkit.run.planning.build import output_name, transformed_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan
from trainkit.trained.build import meta_model

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
DIGITS, EIGHT = ("recipe=digits", "model.hidden=[32,48]"), ("convert=float8", "convert.emulate=true")
WIDE = (*DIGITS, "precision=bf16_mixed", "convert=float8")
EMULATED = (*WIDE, "convert.emulate=true")


def problems_of(*arguments: str) -> list[str]:
    plan = make_plan(api.compose(arguments).cfg)
    with pytest.raises(ConfigError) as caught:
        model_notes(plan, meta_model(plan.cfg))
    return [str(problem) for problem in caught.value.problems]


def test_the_output_layer_and_odd_dims_stay() -> None:
    model = Gpt(vocab_size=32, context=8, num_layers=1, num_heads=2, width=16, bias=True)
    assert output_name(model) == "head.output"
    assert len(Float8().layers(model, output="head.output")) == 4
    assert Float8(exclude=["blocks.*"]).layers(model, output="head.output") == ["head.output"]
    assert Float8().layers(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)), output=None) == []


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9) if device else (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    model = nn.Sequential(nn.Linear(16, 16))
    settings: dict[str, Any] = {"output": None, "precision": "bf16"}
    (problem,) = Float8().problems(model, devices=["cuda:1", "cuda:0"], **settings)
    assert "A100 has no units for float8" in str(problem)
    assert Float8().problems(model, devices=["cuda:1"], **settings) == []
    monkeypatch.setattr(float8, "find_spec", lambda _: None)
    assert problems_of(*EMULATED)[0].startswith("convert=float8: needs torchao: pip install")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (WIDE, "convert=float8: the CPU has no units for float8"),
        ((*DIGITS, "precision=fp32", *EIGHT), "precision=fp32: has no use for float8"),
        (("recipe=digits", "model.hidden=[20]", "precision=bf16", *EIGHT), "convert=float8: converts no layer"),
        ((*DIGITS, "precision=bf16", "strategy=central_storage", *EIGHT),
         "convert=float8: strategy=central_storage does not support converted layers"),
        ((*EMULATED, "convert.exclude=[head*]"), "convert.exclude=head*: matches no linear layer. There are: "),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_said(
    arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda _: True)
    assert any(problem.startswith(text) for problem in problems_of(*arguments))


def test_prove_says_that_the_numbers_differ_by_design_and_only_a_conversion_counts_for_the_fingerprint() -> None:
    cfgs = [api.compose([*WIDE[:3], *more]).cfg for more in ([], ["convert=none"], EIGHT)]
    plain, none, eight = map(fingerprint, cfgs)
    assert plain == none != eight
    answer = same_training(make_plan(cfgs[0]), make_plan(cfgs[2]), lambda: pytest.fail("is not probed"))
    assert answer.verdict == "no"
    assert answer.reasons[0].startswith("convert rounds products to eight bits by design")
    assert with_precision(cfgs[2], "fp64").convert == {}


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_are_rounded_and_names_parameters_and_bits_of_weights_stay(recipe: str) -> None:
    configs = [api.compose(overrides).cfg for overrides in (WIDE[:3], [*EMULATED, f"convert.recipe={recipe}"])]
    plain, eight = (
        transformed_model(plan.cfg, plan.components.strategy, plan.tasks[0]) for plan in map(make_plan, configs)
    )
    assert list(plain.state_dict()) == list(eight.state_dict())
    assert all(torch.equal(tensor, eight.state_dict()[name]) for name, tensor in plain.state_dict().items())
    inputs = torch.linspace(-1, 1, 8 * 64).reshape(8, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        exact, other = plain(inputs), eight(inputs)
        other.sum().backward()
    assert not torch.equal(exact, other)
    torch.testing.assert_close(exact, other, rtol=0.25, atol=0.1)  # 3 bits of mantissa in each of two layers
    assert present(next(eight.parameters()).grad).dtype is torch.float32


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_shard_may_have_any_number_of_rows_on_a_gpu(recipe: Any) -> None:
    with torch.device("meta"):  # its checks of a product are those of a GPU
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 64)).bfloat16()
        inputs = torch.ones(5, 32, dtype=torch.bfloat16)
    Float8(recipe=recipe).convert(model, output=None)(inputs).sum().backward()
    assert [present(param.grad).shape for param in model.parameters()] == [param.shape for param in model.parameters()]


STEPS = ("steps=3", "callbacks=[]", "logger=[]", "quiet=true", "batch.micro_size=32")


@needs_torchao
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_graphs")
def test_strategies_and_compiled_layers_train_alike_and_a_resumed_run_in_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *EMULATED, *STEPS)
    for name, more in (
        ("two", ("strategy=fsdp", "strategy.replicas=2")),
        ("compiled", ("compile.mode=default", "compile.backend=aot_eager")),
    ):
        other = run(tmp_path / name, *EMULATED, *STEPS, *more)
        assert other["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    run(tmp_path / "broken", *EMULATED, *STEPS, "stop_at_step=2")
    resumed = run(tmp_path / "broken", *EMULATED, *STEPS, f"resume={tmp_path / 'broken'}")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
