from __future__ import annotations

import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from trainkit.config.targets.build import build, resolve_target
from trainkit.trainer.events import Callback

CONF = Path(__file__).parents[2] / "conf"
CHOICES = sorted([*CONF.glob("callbacks/*.yaml"), *CONF.glob("logger/*.yaml")])


@pytest.mark.parametrize("file", CHOICES, ids=lambda path: path.stem)
def test_a_choice_lists_every_setting_with_its_default_and_builds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")  # as where all extras are installed
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")
    node = yaml.safe_load(file.read_text())
    parameters = inspect.signature(resolve_target(node["_target_"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    assert listed == {name: value for name, value in node.items() if name != "_target_"}
    assert isinstance(build(node), Callback)
