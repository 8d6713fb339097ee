"""A sweep that starts before its last point was checked, or drops a key of some points, is caught here alone."""

from pathlib import Path

import pytest
import torch

from tests.config.conftest import Refuse
from trainkit.config.compose.composer import Composer
from trainkit.config.compose.jobs import ComposedConfigLoader
from trainkit.config.composition import Composition
from trainkit.errors import ConfigError
from trainkit.verbs.support.call import parse


def points(*arguments: str) -> list[Composition]:
    call, _ = parse(["-m", "recipe=null", *arguments])
    return call.compose_points()


def test_comma_lists_are_multiplied_in_order() -> None:
    found = [(one.values["seed"], one.values["optimizer"]["lr"]) for one in points("seed=1,2", "optimizer.lr=0.1,0.2")]
    assert found == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]


def test_every_countable_sweep_of_hydra_counts() -> None:
    assert [one.values["seed"] for one in points("seed=range(1,4)", "sweep.name=mine")] == [1, 2, 3]
    assert [one.values["seed"] for one in points("seed=choice(5,7)")] == [5, 7]
    assert [one.values["seed"] for one in points("seed=3")] == [3]
    assert [one.choices["schedule"] for one in points("schedule=glob(in*)")] == ["inverse_sqrt"]


def test_a_key_of_a_group_applies_to_the_choices_that_have_it() -> None:
    one_device, mirrored = points("strategy=one_device,mirrored", "strategy.replicas=2", "strategy.device=cpu")
    assert (one_device.values["strategy"]["device"], "device" in mirrored.values["strategy"]) == ("cpu", False)
    assert "replicas" not in one_device.values["strategy"]
    assert one_device.notes[-1] == "strategy.replicas: left out, one_device has no such key"
    assert mirrored.values["strategy"]["replicas"] == 2


@pytest.mark.parametrize("prefix", ["", "+"])
def test_a_key_that_only_the_class_of_the_user_takes_is_swept(prefix: str) -> None:
    """`width` is a key of the shipped gpt, which no class of these points is."""
    own = "model._target_=tests.config.test_points.Net"
    call, _ = parse(["--allow-package", "tests", "-m", "recipe=null", own, f"{prefix}model.width=8,16"])
    assert [point.values["model"]["width"] for point in call.compose_points()] == [8, 16]


class Net(torch.nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(64, width)


def test_a_key_that_no_point_has_is_a_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        points("optimizer=adamw,adam", "optimizer.momentum=0.9")
    assert [str(problem) for problem in caught.value.problems] == [
        "optimizer.momentum: no such key in adamw. It belongs to sgd: add optimizer=sgd. (command line)"
    ]


def test_problems_of_plans_are_reported_for_all_points_before_the_first_run(refuse: Refuse) -> None:
    told = refuse("-m", "recipe=null", "steps=20", "warmup.steps=5,30,40", "batch.micro_size=64,32")
    rule = "steps of warmup, and the training has 20. Use 20 or fewer. (command line)"
    assert told == [f"warmup.steps=30: 30 {rule}", f"warmup.steps=40: 40 {rule}"]


def test_the_command_of_a_point_holds_what_it_needs_and_nothing_of_the_sweep(tmp_path: Path) -> None:
    loader = ComposedConfigLoader(Composer([tmp_path], ["tests"]))
    line = ["recipe=null", "strategy=one_device", "strategy.replicas=2", "sweep.name=x", "hydra.sweep.dir=y"]
    command = loader.command(line, tmp_path / "job 1")
    assert command[1:] == (
        "-m", "trainkit", "--config-dir", str(tmp_path), "--allow-package", "tests",
        "recipe=null", "strategy=one_device", f'hydra.run.dir="{tmp_path}/job 1"',
    )  # fmt: skip
