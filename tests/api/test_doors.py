"""A setting that Python takes and the command line refuses, or a flag as advice in Python, is caught here alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainkit
from trainkit.cli import main
from trainkit.config.door import advice, called_from
from trainkit.errors import ConfigError
from trainkit.models.sampling import Sampling
from trainkit.testing import assert_same_training

OWN = ["recipe=null", "steps=1", "quiet=true", "callbacks=[]", "logger=[]", "model._target_=test_doors_kit.Net"]
NET = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
NAN = float("nan")


def refused(call: Callable[..., Any], *given: Any, **keys: Any) -> list[str]:
    """The problems of a call."""
    with pytest.raises(ConfigError) as caught:
        call(*given, **keys)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": NAN}, "temperature=nan: must be a number, 0 or more."),
        ({"top_p": 1.5}, "top_p=1.5: must be a number above 0, at most 1."),
        ({"top_k": 2.0}, "top_k=2.0: must be a whole number, 1 or more."),
        ({"max_tokens": -3}, "max_tokens=-3: must be a whole number, 1 or more."),
        ({"temperature": 0.0, "top_k": 3}, "top_k=3: has no effect: the most likely token is chosen."),
        ({"seed": 3}, "seed=3: has no effect: the most likely token is chosen."),
    ],
)
def test_generate_refuses_what_its_verb_refuses(settings: dict[str, Any], problem: str) -> None:
    (told,) = refused(trainkit.generate, "no run", ["a"], **settings)
    assert told.startswith(problem)


def test_other_calls_refuse_what_their_verbs_refuse(cwd: Path) -> None:
    Path("file").touch()
    one = {"model": nn.Linear(2, 3), "dataset": torch.zeros(5, 2)}
    assert refused(Sampling, temperature=-1.0) == ["temperature=-1.0: must be a number, 0 or more."]
    assert refused(trainkit.predict, **one, batch_size=0) == ["batch_size=0: must be a whole number, 1 or more."]
    assert refused(trainkit.predict, **one, checkpoint="bst") == ["checkpoint=bst: must be best or last."]
    assert refused(trainkit.load, "file", checkpoint="bst") == ["checkpoint=bst: must be best or last."]
    assert refused(trainkit.train, run_dir="") == ["run_dir=: is empty. Name a folder."]
    assert refused(trainkit.session, run_dir="file/x") == ["run_dir=file/x: file is no folder."]
    steps = ["steps=0: must be 1 or more steps, 1,000,000 at most. (command line)"]
    assert refused(assert_same_training, ["recipe=null"], strategies=["mirrored strategy.replicas=2"], steps=0) == steps
    assert [*cwd.iterdir()] == [cwd / "file"]


def test_python_is_told_its_own_names_and_they_work(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(cwd)
    Path("test_doors_kit.py").write_text(NET)
    (told,) = refused(trainkit.train, OWN)
    assert told.split(" To trust it: ")[1] == 'packages=["test_doors_kit"]. (command line)'
    assert trainkit.train(OWN, packages=["test_doors_kit"])["steps"] == 1
    assert main(OWN) == 2
    assert "To trust it: --allow-package test_doors_kit. (command line)" in capsys.readouterr().err
    told, *_ = refused(trainkit.train, ["--allow-package", "test_doors_kit"])
    assert told.startswith("--allow-package: is not key=value. Flags have names in Python: packages=[...]")
    assert refused(trainkit.compose, config_dirs=["no"])[0] == f'config_dirs=["{cwd}/no"]: is not a folder.'
    with_config = refused(trainkit.train, trainkit.compose(["recipe=null"]), packages=["test_doors_kit"])
    assert with_config == ["packages: is given together with a whole config. Give it to trainkit.compose."]


def test_a_call_within_a_call_keeps_its_door() -> None:
    assert advice("flag", "name") == "flag"
    with called_from("python"), called_from("command line"):
        assert advice("flag", "name") == "name"
