"""Several optimizers of a run: what is refused before the start, and what plan, log and recipe show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainkit
from tests.contract.stepping import CONF
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.memory import memory_of, meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.trainer.checkpoint import load

GAN = ("recipe=gan", "callbacks=[]", "logger=[]")
LINEAR = "{_target_:trainkit.schedules.Linear}"
BODY = "optimizers.body.match=['layers.0.*']"


def planned(*overrides: str) -> RunPlan:
    composition = checked(compose(list(overrides)))
    plan = make_plan(composition.cfg)
    model_notes(plan, meta_model(plan))
    return plan


def refused(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        planned(*overrides)
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (("recipe=null", "optimizers.body.match=['layer.*']"), "optimizers.body.match", "matches no parameter"),
        (("recipe=null", BODY, "optimizers.head.match=['*.weight']"), "optimizers.head.match", "layers.0.weight"),
        (("recipe=null", BODY), "optimizers", "no optimizer takes layers.2.weight, layers.2.bias"),
        (("recipe=null", "optimizers.all.match=['*']", "optimizers.none.lr=0.1"), "optimizers.none", "takes no param"),
        (("recipe=null", "optimizers.a.lr=1", "optimizers.b.lr=1"), "optimizers.b", "so does a"),
        (("recipe=null", "optimizers.a.lrr=1"), "optimizers.a.lrr", "Did you mean optimizers.a.lr?"),
        (("recipe=null", "optimizers.a.lr=-1"), "optimizers.a.lr", "negative"),
        (("recipe=null", "optimizers.a.match=x"), "optimizers.a.match", "list of patterns"),
        (("recipe=null", "optimizers.a.ratio=2/3"), "optimizers.a.ratio", "1/N"),
        (("recipe=null", "optimizers.a.ratio=2"), "optimizers.a.ratio", "names no phases"),
        (("recipe=null", "optimizers.a={_target_:torch.nn.Linear,lr:1}"), "optimizers.a._target_", "Optimizer"),
        (("recipe=null", "optimizers.a={_target_:torch.optim.SGD,lr:1,lrr:2}"), "optimizers.a.lrr", "lr"),
        (("recipe=null", "optimizers.a={_target_:os.system,lr:1}"), "optimizers.a._target_", ""),
        (("recipe=null", "optimizers=3"), "optimizers", "must be a mapping"),
        (("recipe=gan", "optimizers={}"), "optimizers", "discriminator, generator"),
        (("recipe=gan", "optimizers.critic.lr=1"), "optimizers.critic", "no such phase"),
        (
            ("recipe=gan", "optimizers.generator.ratio=1/2", "optimizers.discriminator.ratio=1/3"),
            "optimizers",
            "no phase",
        ),
        ((*GAN, "optimizers.generator.lr=1", "optimizer.lr=2"), "optimizer.lr", "has no effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misfit_is_refused_by_its_key(overrides: tuple[str, ...], key: str, part: str) -> None:
    assert [(one.key, part in one.rule) for one in refused(*overrides)] == [(key, True)]


@pytest.mark.parametrize("strategy", sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")))
def test_a_strategy_takes_several_optimizers_or_refuses_them_by_name(strategy: str) -> None:
    if strategy in {"one_device", "mirrored", "multi_worker_mirrored", "fsdp"}:
        assert [one.name for one in planned(*GAN, f"strategy={strategy}").optimizers] == ["discriminator", "generator"]
    else:
        assert "optimizers" in [one.key for one in refused(*GAN, f"strategy={strategy}")]


def test_frozen_parameters_need_no_optimizer_and_a_pattern_for_them_alone_is_refused() -> None:
    plan = planned(*GAN)
    model = meta_model(plan)
    own = [param for name, param in model.named_parameters() if name.startswith("generator.")]
    for param in own:
        param.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"optimizers\.generator\.match.* frozen parameters"):
        model_notes(plan, model)
    own[0].requires_grad_(True)
    assert any("updates 2,048 parameters: generator.0.weight" in note for note in model_notes(plan, model))


def test_the_memory_of_all_optimizers_is_planned() -> None:
    both = planned(*GAN, "precision=fp32")
    one = planned(*GAN, "optimizers.generator={_target_:torch.optim.SGD,lr:0.1,match:['generator.*']}")
    sizes = [memory_of(plan, meta_model(plan)).optimizer_bytes or 0 for plan in (both, one)]
    count = sum(param.numel() for name, param in meta_model(both).named_parameters() if name.startswith("generator."))
    assert 0 <= sizes[0] - sizes[1] - 2 * 4 * count <= 64  # two moments, and a count of steps a tensor


def test_the_key_changes_no_fingerprint_while_it_is_empty() -> None:
    cfg = compose(["recipe=null"]).cfg
    without = {key: value for key, value in cfg.to_dict().items() if key != "optimizers"}
    assert fingerprint(RunConfig.from_dict(without)) == fingerprint(cfg)
    assert fingerprint(compose(["recipe=null", "optimizers.a.match=['*']"]).cfg) != fingerprint(cfg)


def test_the_gan_recipe_logs_each_phase_and_writes_its_pictures(tmp_path: Path) -> None:
    settings = ["recipe=gan", "callbacks=[pictures]", "logger=[]", "epochs=null", "steps=6", "log_every_steps=2"]
    settings += ["optimizers.generator.ratio=1/2", f"optimizers.generator.schedule={LINEAR}"]
    result = trainkit.train(trainkit.compose(settings), run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr/generator"] for row in rows if "lr/generator" in row]
    assert rates == pytest.approx([0.0005 * (1 - step / 6) for step in (1, 3, 5)])
    assert {"train/discriminator", "train/generator", "lr/discriminator"} <= rows[0].keys()
    assert {"val/loss", "val/real", "val/fake"} <= result["metrics"].keys()
    (picture,) = (tmp_path / "pictures").iterdir()
    assert picture.name == "step_000006.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_entry_of_the_recipe_can_be_deleted() -> None:
    entries = ["optimizers.both.match=['*']", "~optimizers.discriminator", "~optimizers.generator"]
    plan = planned("recipe=gan", *entries, "objective=regression", "callbacks=[]", "eval.metric=val/loss")
    assert [one.name for one in plan.optimizers] == ["both"]


def test_pictures_that_the_model_cannot_make_are_refused_before_the_first_step(tmp_path: Path) -> None:
    settings = ["recipe=gan", "callbacks=[pictures]", "callbacks.pictures.latent=8", "logger=[]", "steps=6"]
    with pytest.raises(ConfigError, match=r"callbacks\.pictures: calls model.* with noise of \(64, 8\)"):
        trainkit.train(trainkit.compose(settings), run_dir=tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 0


@pytest.mark.parametrize("strategy", [["one_device"], ["mirrored", "strategy.replicas=2"]], ids=str)
@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_replicas_as_if_it_had_not_stopped(
    tmp_path: Path, strategy: list[str]
) -> None:
    common = [*GAN, "epochs=null", "steps=6", "batch.micro_size=32", "precision=fp64", "eval.every_epochs=null"]
    whole = trainkit.train(trainkit.compose(common), run_dir=tmp_path / "whole")
    chosen = [f"strategy={strategy[0]}", *strategy[1:]]
    trainkit.train(trainkit.compose([*common, *chosen, "stop_at_step=3"]), run_dir=tmp_path / "first")
    other = ["strategy=fsdp", "strategy.replicas=2"] if strategy[0] == "one_device" else []
    found = trainkit.train(
        trainkit.compose([*common, *other, f"resume={tmp_path / 'first'}"]), run_dir=tmp_path / "second"
    )
    expected, tensors = (load(Path(one["last"])).tensors for one in (whole, found))
    assert expected.keys() == tensors.keys()
    for name in expected:
        tensor = expected[name]
        assert torch.allclose(tensors[name], tensor, rtol=1e-12, atol=1e-12), name
