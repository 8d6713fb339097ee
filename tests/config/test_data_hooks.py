"""A key of `data` that names code and is run before it was judged is caught here alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from trainkit.config.check import checked
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build_callable
from trainkit.errors import ConfigError

CONF = Path(__file__).resolve().parents[1] / "support" / "conf"
OWN = "tests.support.own_data"


def problems(argument: str) -> list[str]:
    try:
        checked(trainkit.compose(["recipe=null", argument], config_dirs=[CONF], packages=["tests"]))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_functions_and_classes_are_taken_by_name_or_as_a_node() -> None:
    for argument in (
        f"data.collate={OWN}.pad",
        f"data.collate={{_target_: {OWN}.hide_words, share: 0.1}}",
        "data.collate=trainkit.data.PadSequences",
        "data.sampler=trainkit.data.BalancedClasses",
        "data.collate=null",
    ):
        assert problems(argument) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("data.collate=os.system", "data.collate=os.system: os is not among the packages"),
        ("data.collate={_target_: os.system}", "data.collate._target_=os.system: os is not among the packages"),
        (f"data.collate={OWN}.pod", f"data.collate={OWN}.pod: there is no pod in {OWN}."),
        ("data.collate=torch.nn.Linear", "data.collate=torch.nn.Linear: is no collate"),
        ("data.sampler=torch.utils.data.RandomSampler", "data.sampler=torch.utils.data.RandomSampler: is no function"),
        ("data.collate=3", "data.collate=3: must be the dotted name of a function or class"),
        (f"data.collate={OWN}.hide_words", "data.collate.share: is missing: hide_words needs it."),
        (f"data.collate={{_target_: {OWN}.hide_words, shore: 1}}", "data.collate.shore: no such key in hide_words."),
        ("data.collat=x.y", "data.collat: no such key in digits. Did you mean data.collate?"),
    ],
)
def test_what_cannot_be_called_there_is_refused_with_its_key(argument: str, said: str) -> None:
    assert problems(argument)[0].startswith(said)


def test_a_name_in_the_file_of_a_run_obeys_the_same_rule() -> None:
    with pytest.raises(ConfigError, match=r"data\.collate.*os is not among the packages"):
        build_callable("os.system", "data.collate")


def test_a_key_without_a_value_leaves_the_fingerprint_as_it_was() -> None:
    plain = {"data": {"_target_": "trainkit.data.Digits", "scaling": "unit"}}
    unset = {"data": {**plain["data"], "collate": None, "sampler": None}}
    given = {"data": {**plain["data"], "collate": "trainkit.data.Lists"}}
    prints = [fingerprint(RunConfig.from_dict(values)) for values in (plain, unset, given)]
    assert prints[0] == prints[1] != prints[2]
