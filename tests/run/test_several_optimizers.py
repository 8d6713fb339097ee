"""A parameter that two optimizers update, or none, is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from trainkit.trainer.checkpoint.loading import load

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
        (("optimizers.body.match=['layer.*']",), "optimizers.body.match", "matches no parameter"),
        ((BODY, "optimizers.head.match=['*.weight']"), "optimizers.head.match", "layers.0.weight"),
        ((BODY,), "optimizers", "no optimizer takes layers.2.weight, layers.2.bias"),
        (("optimizers.all.match=['*']", "optimizers.none.lr=0.1"), "optimizers.none", "takes no param"),
        (("optimizers.a.lr=1", "optimizers.b.lr=1"), "optimizers.b", "so does a"),
        (("optimizers.a.ratio=2/3",), "optimizers.a.ratio", "1/N"),
        (("optimizers.a.ratio=2",), "optimizers.a.ratio", "names no phases"),
        (("optimizers.a={_target_:torch.optim.SGD,lr:1,lrr:2}",), "optimizers.a.lrr", "lr"),
        (("recipe=gan", "optimizers={}"), "optimizers", "discriminator, generator"),
        (("recipe=gan", "optimizers.critic.lr=1"), "optimizers.critic", "no such phase"),
        (("recipe=gan", "optimizers.generator.ratio=1/2", "optimizers.discriminator.ratio=1/3"), "optimizers", "no ph"),
        ((*GAN, "optimizers.generator.lr=1", "optimizer.lr=2"), "optimizer.lr", "has no effect"),
    ],
)
def test_a_misfit_is_refused_by_its_key(overrides: tuple[str, ...], key: str, part: str) -> None:
    recipe = () if "recipe=gan" in overrides else ("recipe=null",)
    assert [(one.key, part in one.rule) for one in refused(*recipe, *overrides)] == [(key, True)]


def test_a_strategy_takes_several_optimizers_or_refuses_them_by_name() -> None:
    taking = {"one_device", "mirrored", "multi_worker_mirrored", "fsdp"}
    for strategy in sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")):
        keys = (*GAN, f"strategy={strategy}")
        if strategy in taking:
            assert [one.name for one in planned(*keys).optimizers] == ["discriminator", "generator"]
        else:
            assert "optimizers" in [one.key for one in refused(*keys)], strategy


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


@pytest.mark.parametrize(
    ("before", "after"),
    [([], ["strategy=fsdp", "strategy.replicas=2"]), (["strategy=mirrored", "strategy.replicas=2"], [])],
)
@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_replicas(tmp_path: Path, before: list[str], after: list[str]) -> None:
    def trained(name: str, *keys: str) -> dict[str, Any]:
        return trainkit.train(trainkit.compose([*common, *keys]), run_dir=tmp_path / name)

    common = [*GAN, "epochs=null", "steps=6", "batch.micro_size=32", "precision=fp64", "eval.every_epochs=null"]
    whole = trained("whole")
    trained("first", *before, "stop_at_step=3")
    found = trained("second", *after, f"resume={tmp_path / 'first'}")
    expected, tensors = (load(Path(one["last"])).tensors for one in (whole, found))
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensors[name], tensor, rtol=1e-12, atol=1e-12), name
