"""A row that a resume loses or makes twice, a rank above 0 that writes, or a choice of `callbacks` that does not list
a setting is caught here alone: what every run has.
A text sample that fails a finished training, or a rank that leaves the others alone in a collective, is caught here
alone.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import yaml

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.every_run import FinalSummary, MetricsFile, StartupSummary, keep_until
from trainkit.callbacks.figures import Confusion, Plots
from trainkit.callbacks.progress import Progress
from trainkit.callbacks.sample import Sample
from trainkit.callbacks.tensorboard import TensorBoard
from trainkit.config.targets.build import build, resolve_target
from trainkit.data.sets.text import PythonSource
from trainkit.errors import ConfigError
from trainkit.models.gpt import Gpt
from trainkit.objectives.tables import Table
from trainkit.tracking.wandb import Wandb
from trainkit.trainer.events import Callback, Run

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


def steps_in(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_rows_evaluations_and_tables_are_lines_of_json(tmp_path: Path) -> None:
    run, file = run_double(tmp_path, step=10), MetricsFile()
    file.log(run, {"step": 10, "train/loss": math.nan, "lr": 0.1})
    file.eval_end(run, {"val/loss": 0.25})
    file.eval_tables(run, {"val/each": Table(columns=("class", "recall"), rows=(("cat", 0.5), ("dog", math.nan)))})
    file.run_end(run, {})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 10, "train/loss": null, "lr": 0.1}\n{"step": 10, "epoch": 0.1, "val/loss": 0.25}\n'
    )
    assert (tmp_path / "tables.jsonl").read_text() == (
        '{"step": 10, "epoch": 0.1, "name": "val/each", "columns": ["class", "recall"], '
        '"rows": [["cat", 0.5], ["dog", null]]}\n'
    )


def test_rows_are_written_once_a_second_and_before_a_checkpoint(tmp_path: Path) -> None:
    now, run = [0.0], run_double(tmp_path)
    file = MetricsFile(clock=lambda: now[0])
    for step, now[0], written in ((1, 0.0, [1]), (2, 0.5, [1]), (3, 0.9, [1]), (4, 1.0, [1, 2, 3, 4])):
        file.log(run, row(step))
        assert steps_in(tmp_path) == written
    file.log(run, row(5))
    assert file.state() == {}
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_a_resumed_run_drops_the_rows_to_come_and_what_is_no_row(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "tables.jsonl"):
        lines = "".join(f"{json.dumps(row(step))}\n" for step in (0, 10, 20, 30))
        (tmp_path / name).write_text(lines + '[1]\n{"lr": 1}\n{"st')
    MetricsFile().run_start(run_double(tmp_path, step=20))
    assert steps_in(tmp_path) == steps_in(tmp_path, "tables.jsonl") == [0, 10, 20]
    keep_until(tmp_path / "metrics.jsonl", 0)  # it starts over
    assert steps_in(tmp_path) == []


def test_the_end_of_a_compiled_run_says_how_long_compiling_took(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(Path("outputs/digits/1"))
    run.cfg = replace(run.cfg, compile=replace(run.cfg.compile, mode="step"))
    summary = FinalSummary()
    summary.run_start(run)
    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2))
    summary.run_end(run, {"status": "finished"})
    assert re.search(r"\n  compiling  took \d.*\n  folder     outputs/digits/1\n$", capsys.readouterr().out)


def writing_run(folder: Path, vocab_size: int = 256) -> Run:
    run = run_double(folder)
    run.model = Gpt(vocab_size=vocab_size, context=8, num_layers=1, num_heads=1, width=4)
    run.datasets = {"train": PythonSource(split="train", context=8, max_bytes=1000)}
    return run


def test_the_end_prints_a_sample_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sample = writing_run(tmp_path), Sample(prompt="def ", num_tokens=5)
    sample.run_start(run)
    sample.train_end(run, {"status": "finished"})
    kept = (tmp_path / "sample.txt").read_bytes().decode()  # an untrained model writes "\\r" too
    assert kept.startswith("def ")
    assert capsys.readouterr().out.startswith("sample\n  def ")
    assert sample.text(run) + "\n" == kept


def test_a_token_that_the_text_does_not_have_fails_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Sample(num_tokens=20, top_k=None).train_end(writing_run(tmp_path, 100_000), {"status": "finished"})
    (message,) = caplog.messages
    assert message.startswith("sample: the dataset cannot decode the tokens of the model: ")


def test_what_cannot_write_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.sample: .* missing: generate, encode"):
        Sample().run_start(run_double(tmp_path))
    with pytest.raises(ConfigError, match=r"callbacks.sample.prompt='': "):
        Sample(prompt="").run_start(writing_run(tmp_path))


def test_every_rank_takes_part_where_ranks_compute_together_and_the_owner_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Run] = []

    def text(_: Sample, asking: Run) -> str:
        asked.append(asking)
        return "text"

    monkeypatch.setattr(Sample, "text", text)
    run = run_double(tmp_path)
    for status, run.is_owner, run.computes_together, takes_part, writes in (
        ("failed", True, False, False, False),
        ("finished", False, False, False, False),
        ("finished", False, True, True, False),
        ("finished", True, True, True, True),
    ):
        asked.clear()
        Sample().train_end(run, {"status": status})
        assert (bool(asked), (tmp_path / "sample.txt").exists()) == (takes_part, writes)
