"""A file of which `trainkit train mine.py` trains another class than the one that is named is caught here alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError, TrainingError
from trainkit.objectives.per_sample import LossPerSample
from trainkit.verbs.support.one_file import arguments_of

WHOLE = """
import torch
from torch import nn
from torch.utils.data import Dataset
class Base(nn.Sequential): ...
class Net(Base): ...
class Points(Dataset[int]): ...
def loss(outputs, targets): return (outputs - targets).square()
"""


@pytest.fixture(autouse=True)
def file(cwd: Path) -> Path:
    path = cwd / "of_mine.py"
    path.write_text(WHOLE.replace("class Net(Base)", "class Model(Base)"))
    return path


def test_the_parts_of_a_file_are_found_by_name_or_as_the_only_ones() -> None:
    assert arguments_of("of_mine.py", ["seed=1"]) == (
        [
            "recipe=null", "name=of_mine", "model=null", "model._target_=of_mine.Model", "data=null",
            "data._target_=of_mine.Points", "objective=null",
            "objective._target_=trainkit.objectives.LossPerSample", "objective.function=of_mine.loss",
        ],
        "of_mine",
    )  # fmt: skip
    overrides = ["recipe=digits", "objective=classification", "model._target_=of_mine.Base"]
    assert arguments_of("./of_mine.py", overrides) == (["data=null", "data._target_=of_mine.Points"], "of_mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            WHOLE,
            "several that may be the model: Base, Net. Name one of them Model, or give model._target_=of_mine.Net.",
        ),
        (WHOLE + "def Loss(): ...", "several that may be the loss: Loss, loss."),
        ("x = 1", "has no data: no Data or data, and no class derived from Dataset. It defines nothing."),
        (WHOLE.replace("def loss(outputs, targets): return", "loss ="), "A loss that is assigned is not found"),
        ("def", "is no Python: "),
    ],
)
def test_what_is_ambiguous_or_absent_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        arguments_of("of_mine.py", [])
    assert message in str(refused.value)


def test_a_function_gives_the_loss_of_each_sample_and_no_mean(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    file.write_text("def each(outputs, targets): return outputs - targets\ndef mean(o, t): return (o - t).mean()\n")
    outputs, targets = torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    with allow_packages(["of_mine"]):
        loss = LossPerSample(function="of_mine.each").score(outputs, targets)
        assert (float(loss.loss_sum), loss.weight) == (6.0, 2.0)
        with pytest.raises(TrainingError, match=r"tensor of shape .*, and 2 samples need a loss"):
            LossPerSample(function="of_mine.mean").score(outputs, targets)
    for function in ("of_mine.each", "os.system", "torch.nn.functional.mse_loss"):
        with pytest.raises(ConfigError):
            LossPerSample(function=function)
