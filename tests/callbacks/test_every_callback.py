"""A choice of `callbacks` or `logger` that does not list a setting, or a rank above 0 that writes or prints, is caught
here alone.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.every_run import FinalSummary, MetricsFile, StartupSummary
from trainkit.callbacks.figures.confusion import Confusion
from trainkit.callbacks.plots import Plots
from trainkit.callbacks.progress import Progress
from trainkit.callbacks.tensorboard import TensorBoard
from trainkit.config.targets.build import build, resolve_target
from trainkit.objectives.tables import Table
from trainkit.tracking.wandb import Wandb
from trainkit.trainer.events import Callback

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all extras are installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")


@pytest.mark.usefixtures("_installed")
def test_a_choice_lists_every_setting_with_its_default_and_builds() -> None:
    for file in [*CONF.glob("callbacks/*.yaml"), *CONF.glob("logger/*.yaml")]:
        node: dict[str, Any] = yaml.safe_load(file.read_text())
        parameters = inspect.signature(resolve_target(node["_target_"])).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
        assert {"_target_": node["_target_"], **listed} == node
        assert isinstance(build(node), Callback)


@pytest.mark.usefixtures("_installed")
def test_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(tmp_path, is_owner=False)
    silent = (MetricsFile, TensorBoard, StartupSummary, FinalSummary, Confusion, Progress, Wandb)
    for callback in (Plots(every_s=1e-9), *(kind() for kind in silent)):
        callback.run_start(run)
        callback.log(run, row(1))
        callback.eval_end(run, {"step": 1, "epoch": 0.0, "val/loss": 0.25})
        callback.eval_tables(run, {"val/confusion": Table.of(torch.eye(2), ["cat", "dog"])})
        callback.run_end(run, {"status": "finished"})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
