"""Old names of modules and classes keep working, and change no fingerprint."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit import moved
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import imported

CONF = Path(__file__).resolve().parents[2] / "conf"


def targets() -> list[str]:
    found = [yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*/*.yaml"))]
    named = {values["_target_"] for values in found if isinstance(values, dict) and "_target_" in values}
    return sorted(name for name in named if name.startswith("trainkit."))


@pytest.mark.parametrize("name", targets())
def test_every_choice_is_found_by_its_first_name_and_by_todays(name: str) -> None:
    first = moved.original_name(name)
    assert moved.current_name(first) == name
    assert imported(first) is imported(name)


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_a_module_is_imported_by_its_old_name(old: str) -> None:
    alias, new = import_module(old), import_module(moved.MODULES[old])
    for name, found in vars(new).items():
        if getattr(found, "__module__", None) == new.__name__ and name != "__getattr__":
            assert getattr(alias, name) is found
    with pytest.raises(AttributeError):
        _ = alias.no_such_name


@pytest.mark.parametrize("old", sorted(moved.NAMES))
def test_a_class_is_imported_by_its_old_name(old: str) -> None:
    module, _, name = old.rpartition(".")
    assert getattr(import_module(module), name) is getattr(import_module(module), moved.NAMES[old])


@pytest.mark.parametrize("old", sorted(moved.CLASSES))
def test_a_class_that_moved_alone_is_found_by_both_names(old: str) -> None:
    module, _, name = old.rpartition(".")
    found = getattr(import_module(module), name)
    assert f"{found.__module__}.{found.__qualname__}" == moved.current_name(old)
    assert moved.original_name(moved.current_name(old)) == old
    assert imported(old) is found


def test_a_module_below_an_old_package_and_a_renamed_class_in_it_are_imported() -> None:
    replica, loop = import_module("trainkit.strategies.replica"), import_module("trainkit.engine.loop")
    assert replica.Held is import_module("trainkit.strategies.core.replica").PlacedModel
    assert loop.Trigger is import_module("trainkit.trainer.loop").Trigger


@pytest.mark.parametrize("module", ["worker", "evaluator"])
def test_the_entries_of_processes_run_by_their_old_names(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"trainkit.run.{module}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: python -m trainkit.run.")) == (2, True), done.stderr


def test_a_config_of_old_names_is_that_of_todays() -> None:
    def config(data: str, strategy: str) -> dict[str, Any]:
        nested = {"n": {"_target_": "trainkit.engine.loop.X"}, "l": [{"_target_": "trainkit.engine.loop.X"}]}
        return {"data": {"_target_": data, **nested}, "strategy": {"_target_": strategy}}

    old = RunConfig.from_dict(config("trainkit.data.digits.Digits", "trainkit.strategies.mirrored.Mirrored"))
    new = RunConfig.from_dict(config("trainkit.data.sets.digits.Digits", "trainkit.strategies.data_parallel.Mirrored"))
    assert old == new
    assert new.data["l"][0]["_target_"] == new.data["n"]["_target_"] == "trainkit.trainer.loop.X"
    assert fingerprint(old) == fingerprint(new)


def test_a_name_that_never_moved_is_left_alone() -> None:
    for name in ("torch.optim.SGD", "mine.data.digits.Digits", "trainkit.models.mlp.Mlp", "trainkit", ""):
        assert moved.current_name(name) == moved.original_name(name) == name
    with pytest.raises(ModuleNotFoundError):
        import_module("trainkit.engine.no_such_module")


def test_a_hostile_name_of_a_million_dots_is_returned_as_it_is() -> None:
    name = "trainkit.data.digits" + ".x" * 1_000_000  # looking up each prefix apart would take an hour
    assert moved.original_name(name) == name
    assert moved.current_name(name) == name.replace("digits", "sets.digits")
