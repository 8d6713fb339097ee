"""A row that a resume loses or makes twice, a rank above 0 that writes, or a choice of `callbacks` that does not list
a setting is caught here alone: what every run has.
A text sample that fails a finished training, or a rank that leaves the others alone in a collective, is caught here
alone.

A run that stops early or lowers its learning rate at another evaluation than it must, also after a resume, is
caught here alone: `callbacks=[early_stop]` and `callbacks=[plateau]`.
An alert that runs a hostile name, hangs the end of a run, prints its secret URL or is sent twice is caught here
alone.
An alert that is not sent, because the run failed outside of its ranks, is caught here alone.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import yaml
from torch.optim.lr_scheduler import ReduceLROnPlateau

import trainkit
from tests.callbacks.run_double import row, run_double
from tests.contract.running import run
from trainkit.callbacks.alert import COMMAND, WEBHOOK, Alert, call_command, channels_from, post
from trainkit.callbacks.every_run import FinalSummary, MetricsFile, StartupSummary, keep_until
from trainkit.callbacks.figures import Confusion, Plots
from trainkit.callbacks.generated import Sample
from trainkit.callbacks.monitored import EarlyStop, Plateau
from trainkit.callbacks.progress import Progress
from trainkit.callbacks.tensorboard import TensorBoard
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, resolve_target
from trainkit.data.sets.text import PythonSource
from trainkit.errors import ConfigError, CrashLoopError, NonFiniteError, TerminatedError, TrainkitError
from trainkit.models.gpt import Gpt
from trainkit.objectives.tables import Table
from trainkit.run.folder.run_folder import RunFolder
from trainkit.tracking.tracker import Wandb
from trainkit.trainer.events import Callback, Ending, Run, ended_hooks

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
    silent = (Plots, MetricsFile, TensorBoard, StartupSummary, FinalSummary, Confusion, Progress, Wandb)
    for callback in [kind() for kind in silent]:
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


@pytest.mark.slow
def test_the_end_of_a_compiled_run_says_how_long_compiling_took(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(Path("outputs/digits/1"))
    run.cfg = replace(run.cfg, compile=replace(run.cfg.compile, mode="step"))
    summary = FinalSummary()
    summary.run_start(run)
    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2))
    summary.run_end(run, {"status": "finished"})
    assert re.search(
        r"\n  compiling  took \d.*\n  folder     outputs/digits/1\n  page       outputs/", capsys.readouterr().out
    )


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


@pytest.mark.slow
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


ACCURACY = {"metric": "val/accuracy", "mode": "max", "every_steps": 1, "every_epochs": None}
RISING = (
    "model=net", "data=points", "epochs=6", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.maximize=true",
    "schedule=constant", "batch.global_size=16", "batch.micro_size=8", "log_every_steps=1", "callbacks=[plateau]",
    "callbacks.plateau.patience=1", "callbacks.plateau.factor=0.5",
)  # fmt: skip


def reason_after(stop: EarlyStop, values: list[float]) -> str | None:
    """Why a run ends after evaluations with these accuracies, one a step."""
    watched = run_double(Path(), eval=ACCURACY)
    for value in values:
        watched.state.step = stop.state()["counted"] + 1
        stop.eval_end(watched, {"step": 10.0, "val/loss": 9.0, "val/accuracy": value})
    return watched.stop_reason


@pytest.mark.parametrize(
    ("values", "min_delta", "stops"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.0, False),
        ([0.4, 0.3, 0.4], 0.0, True),
        ([0.4, 0.45, 0.5], 0.1, True),
        ([0.4, math.nan, math.nan], 0.0, True),
        ([math.nan, 0.1], 0.0, False),
    ],
)
def test_a_run_ends_when_its_metric_stands_still(values: list[float], min_delta: float, stops: bool) -> None:
    reason = reason_after(EarlyStop(patience=2, min_delta=min_delta), values)
    assert reason == ("val/accuracy has not improved for 2 evaluations" if stops else None)


def test_a_resumed_run_goes_on_counting() -> None:
    first, second = EarlyStop(patience=3), EarlyStop(patience=3)
    assert reason_after(first, [0.5, 0.4, 0.4]) is None
    assert first.state().items() >= {"best": 0.5, "waited": 2, "counted": 3}.items()
    second.restore(first.state())
    assert reason_after(second, [0.5]) == "val/accuracy has not improved for 3 evaluations"


@pytest.mark.parametrize(
    ("evaluations", "best", "stops"),
    [
        ([(10, "val/loss", 0.5), (20, "val/loss", 0.4)], 0.4, False),  # less is better without a choice
        ([(10, "val/loss", 0.5), (20, "val/loss", 0.6)], 0.5, True),
        ([(10, "val/loss", 0.5), (14, "val/loss", 0.6), (20, "val/loss", 0.4)], 0.4, False),  # stop_at_step=14, resumed
        ([(10, "test/loss", 0.5), (20, "test/loss", 0.6)], None, False),
        ([(90, "val/loss", 0.5), (100, "val/loss", 0.6)], 0.5, False),  # the last step
    ],
)
def test_only_due_evaluations_of_the_split_before_the_end_count(
    evaluations: list[tuple[int, str, float]], best: float | None, stops: bool
) -> None:
    watched = run_double(Path(), num_steps=100, eval={"every_steps": 10, "every_epochs": None})
    stop = EarlyStop(patience=1)
    for watched.state.step, metric, value in evaluations:
        stop.eval_end(watched, {metric: value})
    assert stop.state()["best"] == best
    assert watched.stop_reason == ("val/loss has not improved for 1 evaluation" if stops else None)


def test_a_metric_that_the_evaluation_does_not_give_is_a_problem() -> None:
    watched = run_double(Path(), eval={"metric": "val/f1", "mode": "max"})
    with pytest.raises(ConfigError, match=r"eval\.metric=val/f1: early_stop .* returns val/loss, val/accuracy\."):
        EarlyStop().eval_end(watched, {"step": 1.0, "val/loss": 1.0, "val/accuracy": 0.5})


@pytest.mark.parametrize(
    "settings",
    [{"patience": 1}, {"patience": 0, "cooldown": 2}, {"patience": 1, "threshold": 0.2, "threshold_mode": "abs"}],
)
def test_the_factors_of_a_plateau_are_those_of_torch(settings: dict[str, Any]) -> None:
    values = [1.0, 0.9, 0.95, 0.9, 0.91, 0.89, 0.895, 0.9, math.nan, 0.9, 0.5, 0.6, 0.6, 0.6, 0.6]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torch_s, ours = ReduceLROnPlateau(optimizer, factor=0.5, **settings), Plateau(factor=0.5, **settings)
    watched = run_double(Path(), eval={"every_steps": 1})
    for step, value in enumerate(values, start=1):
        torch_s.step(value)
        watched.state.step = step
        ours.eval_end(watched, {"step": step, "val/loss": value})
        assert ours.rate_factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        ("strategy=mirrored", "strategy.replicas=2"),
        ("strategy=parameter_server", "strategy.workers=2"),
        ("strategy=local_sgd", "strategy.replicas=1", "strategy.average_every=3"),
    ],
    ids=["mirrored", "parameter_server", "local_sgd"],
)
def test_a_run_that_is_stopped_and_resumed_takes_the_same_rates(tmp_path: Path, placement: tuple[str, ...]) -> None:
    # The loss rises from step 3 on: the evaluations at 6 and 9 are bad, and so are those at 12 and 15.
    run(tmp_path, *RISING, *placement, "stop_at_step=10")
    run(tmp_path, *RISING, *placement, "resume=auto")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if "lr" in row] == pytest.approx([0.05] * 9 + [0.025] * 6 + [0.0125] * 3)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *RISING)
    run(tmp_path / "parts", *RISING, "stop_at_step=10")
    assert run(tmp_path / "parts", *RISING, "resume=auto")["weights_sha256"] == whole["weights_sha256"]


HOSTILE = "$(touch pwned) `touch pwned`; --help '\"\n"


@pytest.fixture(autouse=True)
def no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.delenv(WEBHOOK, raising=False)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the alert's command appends each message to."""
    path, script = tmp_path / "told", tmp_path / "tell"
    script.write_text(f"#!/bin/sh\ncat >> '{path}'\necho >> '{path}'\n")
    script.chmod(0o700)
    monkeypatch.setenv(COMMAND, str(script))
    return path


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_without_a_channel_or_with_another_url_than_http_nothing_starts() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.alert: has neither a URL nor a command"):
        Alert()
    for url in ("file:///etc/passwd", "hooks.example", "https://", "http://a b"):
        with pytest.raises(ConfigError, match=f"{WEBHOOK}: must be a URL"):
            channels_from({WEBHOOK: url})


@pytest.mark.parametrize(
    ("status", "events", "event"),
    [
        ("finished", {}, None),
        ("finished", {"events": ("finished",)}, "finished"),
        ("preempted", {}, "stopped"),
        ("failed", {}, "failed"),
    ],
)
def test_the_end_of_a_run_is_told_as_text_if_it_is_asked_for(
    tmp_path: Path, told: Path, status: Any, events: dict[str, Any], event: str | None
) -> None:
    Alert(**events).ended(Ending(name=HOSTILE, folder=tmp_path, status=status, reason="why", steps=3))
    found = messages(told)
    assert [message["event"] for message in found] == ([] if event is None else [event])
    for message in found:
        assert (message["run"], message["step"], message["folder"]) == (HOSTILE, 3, str(tmp_path))
        assert f"{status} after 3 steps: why" in message["text"]
    assert not (tmp_path / "pwned").exists()


def test_the_alert_of_a_failed_run_contains_the_reason(tmp_path: Path, told: Path) -> None:
    short = ["recipe=null", "callbacks=[alert]", "logger=[]", "quiet=true", "epochs=null", "steps=9"]
    with pytest.raises(NonFiniteError):
        trainkit.train([*short, "optimizer=sgd", "optimizer.lr=1e30"], run_dir=tmp_path / "run")
    (message,) = messages(told)
    assert message["event"] == "failed"
    assert "the loss is nan" in message["text"]


def test_a_loss_that_is_not_finite_sends_one_alert(tmp_path: Path, told: Path) -> None:
    run, alert = run_double(tmp_path), Alert()
    for step in (10, 20):
        alert.log(run, {**row(step), "train/loss": math.nan})
    alert.run_end(run, {})
    assert [message["event"] for message in messages(told)] == ["nonfinite"]


def test_a_metric_better_than_the_threshold_sends_one_alert_also_after_a_resume(tmp_path: Path, told: Path) -> None:
    run, alert, resumed = run_double(tmp_path), Alert(better_than=0.3), Alert(better_than=0.3)
    for loss in (0.3, 0.29, 0.28):
        alert.eval_end(run, {"val/loss": loss})
    alert.run_end(run, {})
    resumed.restore(alert.state())
    resumed.eval_end(run, {"val/loss": 0.1})
    resumed.run_end(run, {})
    (message,) = messages(told)
    assert "val/loss is 0.29, better than 0.3 (" in message["text"]


def test_a_command_that_fails_or_hangs_is_named_and_ended_with_what_it_started() -> None:
    for words, limit, trouble in (
        (("false",), 60.0, "ended with exit code 1"),
        (("/no/such",), 60.0, "cannot be started: No such file or directory"),
        (("/bin/sh", "-c", "sleep 600 & sleep 600"), 0.2, "did not end within 0.2 s"),
    ):
        assert call_command(words, {}, limit) == f"{COMMAND} {trouble}"


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A webhook on the loopback interface, and what was posted to it: /moved redirects, /broken is an error."""
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/moved": 302, "/broken": 500}.get(self.path, 200))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", posted
        found.shutdown()
        thread.join()


def test_a_webhook_gets_the_message_as_json_once_and_its_errors_omit_the_url(server: tuple[str, list[Any]]) -> None:
    url, posted = server
    for path, answer in (
        ("", ""),
        ("/moved", f"{WEBHOOK} was answered with HTTP 302"),
        ("/broken", f"{WEBHOOK} was answered with HTTP 500"),
    ):
        assert post(url + path, {"text": HOSTILE}, 60) == answer
    assert posted == [{"text": HOSTILE, "content": HOSTILE}] * 3
    trouble = post("http://127.0.0.1:9/key-123456", {"text": ""}, 60)
    assert trouble.startswith(f"{WEBHOOK} was not reached")
    assert "123456" not in trouble


CFG = RunConfig.from_dict({"name": "digits", "callbacks": {"alert": {"_target_": "trainkit.callbacks.Alert"}}})


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    found: list[Ending] = []
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")
    monkeypatch.setattr(Alert, "ended", lambda _self, ending: found.append(ending))
    return found


@pytest.mark.parametrize(
    ("error", "status"),
    [(CrashLoopError("rank 1 was killed by SIGKILL\nmore"), "failed"), (TerminatedError("asked to end"), "preempted")],
)
def test_an_error_outside_of_ranks_is_sent(
    tmp_path: Path, endings: list[Ending], error: TrainkitError, status: str
) -> None:
    with pytest.raises(type(error)), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        raise error
    assert [(one.status, one.reason, one.steps) for one in endings] == [(status, str(error).splitlines()[0], None)]


def test_a_result_reaches_the_ended_hook_with_its_steps(tmp_path: Path, endings: list[Ending]) -> None:
    with ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        (tmp_path / "result.json").write_text('{"status": "finished", "reason": "all steps done", "steps": 7}')
    assert [(one.name, one.status, one.steps) for one in endings] == [("digits", "finished", 7)]


def test_an_error_of_the_hook_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRAINKIT_ALERT_COMMAND", raising=False)
    with caplog.at_level(logging.WARNING), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        pass
    assert "callbacks.alert failed in ended: ConfigError" in caplog.text
