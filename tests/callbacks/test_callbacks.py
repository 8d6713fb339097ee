"""Callbacks: what every run has, early stops and rates, alerts, figures of speed and of devices, progress, pictures.

A row that a resume loses or makes twice, a rank above 0 that writes, a choice of `callbacks` that does not list a
setting, a text sample that fails a finished training, and a rank that leaves the others alone in a collective are
caught here alone.
A run that stops early or lowers its learning rate at another evaluation than it must, also after a resume, and an
alert that runs a hostile name, hangs the end of a run, prints its secret URL, is sent twice or never is caught here.
A figure in the wrong unit, of another device or of other steps, a progress line that colours a pipe, and a remaining
time that counts a save beside an evaluation twice or a slow first step for ever are caught here alone.
A matrix that misses samples, a count in the wrong bucket, a gradient before the sum of its shards or with its loss
scale, and pictures or histograms that change a weight are caught here alone.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import io
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import trainkit
from tests.callbacks.run_double import row, run_double
from tests.callbacks.test_tensorboard import read
from tests.contract.running import run
from tests.report.test_run_page import shown
from tests.support.results import result_of
from trainkit.callbacks import gpu
from trainkit.callbacks import profiler as profiling
from trainkit.callbacks.alert import COMMAND, WEBHOOK, Alert, call_command, channels_from, post
from trainkit.callbacks.every_run import CompileTime, FinalSummary, MetricsFile, StartupSummary, keep_until
from trainkit.callbacks.figures import Confusion, Plots, SamplePictures, captioned, dataset_of
from trainkit.callbacks.generated import Sample
from trainkit.callbacks.gpu import Gpu
from trainkit.callbacks.histograms import NUM_COUNTS, Distribution, Histograms, measure, summed
from trainkit.callbacks.monitored import EarlyStop, Plateau
from trainkit.callbacks.profiler import Profiler
from trainkit.callbacks.progress import Pace, Progress, Reading, RepeatedLine, TerminalLine, as_html, plain_text
from trainkit.callbacks.tensorboard import TensorBoard
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, resolve_target
from trainkit.config.targets.choices import read_choice
from trainkit.data.sets.text import PythonSource
from trainkit.errors import ConfigError, CrashLoopError, NonFiniteError, TerminatedError, TrainkitError
from trainkit.models.gpt import Gpt
from trainkit.numerics.schedules import lr_points
from trainkit.objectives.tables import Table
from trainkit.run.folder.run_folder import RunFolder
from trainkit.strategies.base import Status, StepOutcome
from trainkit.strategies.collectives import LocalCollective
from trainkit.tracking.tracker import Wandb
from trainkit.trainer import metrics_accumulator
from trainkit.trainer.events import Callback, Ending, Row, Run, ended_hooks
from trainkit.trainer.loop import CallbackHooks
from trainkit.trainer.metrics_accumulator import PARTS, CountedWork, Instruments, PhaseClock

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all extras are installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")


@pytest.mark.usefixtures("_installed")
def test_a_choice_builds_with_every_setting_of_its_class() -> None:
    for file in [*CONF.glob("callbacks/*.yaml"), *CONF.glob("logger/*.yaml")]:
        node = read_choice(file).values
        assert {"_target_", *inspect.signature(resolve_target(node["_target_"])).parameters} == node.keys()
        assert isinstance(build(dict(node)), Callback)


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
    seconds, run = [0.0], run_double(tmp_path)
    file = MetricsFile(clock=lambda: seconds[0])
    for step, seconds[0], written in ((1, 0.0, [1]), (2, 0.5, [1]), (3, 0.9, [1]), (4, 1.0, [1, 2, 3, 4])):
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
    sample_text = (tmp_path / "sample.txt").read_bytes().decode()  # an untrained model writes "\\r" too
    assert sample_text.startswith("def ")
    assert capsys.readouterr().out.startswith("sample\n  def ")
    assert sample.text(run) + "\n" == sample_text


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
    calls: list[Run] = []

    def text(_: Sample, caller: Run) -> str:
        calls.append(caller)
        return "text"

    monkeypatch.setattr(Sample, "text", text)
    run = run_double(tmp_path)
    for status, run.is_owner, run.computes_together, takes_part, writes in (
        ("failed", True, False, False, False),
        ("finished", False, False, False, False),
        ("finished", False, True, True, False),
        ("finished", True, True, True, True),
    ):
        calls.clear()
        Sample().train_end(run, {"status": status})
        assert (bool(calls), (tmp_path / "sample.txt").exists()) == (takes_part, writes)


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
    torch_s, plateau = ReduceLROnPlateau(optimizer, factor=0.5, **settings), Plateau(factor=0.5, **settings)
    watched = run_double(Path(), eval={"every_steps": 1})
    for step, value in enumerate(values, start=1):
        torch_s.step(value)
        watched.state.step = step
        plateau.eval_end(watched, {"step": step, "val/loss": value})
        assert plateau.rate_factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])


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


HOSTILE = "$(touch pwned) `touch pwned`; --help '\"\n"


@pytest.fixture(autouse=True)
def no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.delenv(WEBHOOK, raising=False)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the alert's command appends each message to."""
    path, script = tmp_path / "alerts.log", tmp_path / "append"
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
    tmp_path: Path, log: Path, status: Any, events: dict[str, Any], event: str | None
) -> None:
    Alert(**events).ended(Ending(name=HOSTILE, folder=tmp_path, status=status, reason="why", steps=3))
    alerts = messages(log)
    assert [message["event"] for message in alerts] == ([] if event is None else [event])
    for message in alerts:
        assert (message["run"], message["step"], message["folder"]) == (HOSTILE, 3, str(tmp_path))
        assert f"{status} after 3 steps: why" in message["text"]
    assert not (tmp_path / "pwned").exists()


def test_the_alert_of_a_failed_run_contains_the_reason(tmp_path: Path, log: Path) -> None:
    short = ["recipe=null", "callbacks=[alert]", "logger=[]", "quiet=true", "epochs=null", "steps=9"]
    with pytest.raises(NonFiniteError):
        trainkit.train([*short, "optimizer=sgd", "optimizer.lr=1e30"], run_dir=tmp_path / "run")
    (message,) = messages(log)
    assert message["event"] == "failed"
    assert "the loss is nan" in message["text"]


def test_a_loss_that_is_not_finite_sends_one_alert(tmp_path: Path, log: Path) -> None:
    run, alert = run_double(tmp_path), Alert()
    for step in (10, 20):
        alert.log(run, {**row(step), "train/loss": math.nan})
    alert.run_end(run, {})
    assert [message["event"] for message in messages(log)] == ["nonfinite"]


def test_a_metric_better_than_the_threshold_sends_one_alert_also_after_a_resume(tmp_path: Path, log: Path) -> None:
    run, alert, resumed = run_double(tmp_path), Alert(better_than=0.3), Alert(better_than=0.3)
    for loss in (0.3, 0.29, 0.28):
        alert.eval_end(run, {"val/loss": loss})
    alert.run_end(run, {})
    resumed.restore(alert.state())
    resumed.eval_end(run, {"val/loss": 0.1})
    resumed.run_end(run, {})
    (message,) = messages(log)
    assert "val/loss is 0.29, better than 0.3 (" in message["text"]


def test_a_command_that_fails_or_hangs_is_named_and_ended_with_what_it_started() -> None:
    for command, limit, trouble in (
        (("false",), 60.0, "ended with exit code 1"),
        (("/no/such",), 60.0, "cannot be started: No such file or directory"),
        (("/bin/sh", "-c", "sleep 600 & sleep 600"), 0.2, "did not end within 0.2 s"),
    ):
        assert call_command(command, {}, limit) == f"{COMMAND} {trouble}"


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

    with HTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}", posted
        http_server.shutdown()
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
    reported: list[Ending] = []
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")
    monkeypatch.setattr(Alert, "ended", lambda _self, ending: reported.append(ending))
    return reported


@pytest.mark.parametrize(
    ("error", "status"),
    [(CrashLoopError("rank 1 was killed by SIGKILL\nmore"), "failed"), (TerminatedError("asked to end"), "preempted")],
)
def test_an_error_outside_of_ranks_is_sent(
    tmp_path: Path, endings: list[Ending], error: TrainkitError, status: str
) -> None:
    with pytest.raises(type(error)), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        raise error
    (ending,) = endings
    assert (ending.status, ending.reason, ending.steps) == (status, str(error).splitlines()[0], None)


def test_a_result_reaches_the_ended_hook_with_its_steps(tmp_path: Path, endings: list[Ending]) -> None:
    with ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        (tmp_path / "result.json").write_text('{"status": "finished", "reason": "all steps done", "steps": 7}')
    assert [(ending.name, ending.status, ending.steps) for ending in endings] == [("digits", "finished", 7)]


def test_an_error_of_the_hook_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRAINKIT_ALERT_COMMAND", raising=False)
    with caplog.at_level(logging.WARNING), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        pass
    assert "callbacks.alert failed in ended: ConfigError" in caplog.text


@pytest.mark.slow
def test_a_run_shows_what_its_steps_take(tmp_path: Path) -> None:
    run = ["recipe=digits", "steps=30", "log_every_steps=5", "hardware=laptop", "quiet=true", "checkpoint.export=false"]
    assert main([*run, "eval.every_epochs=null", f"hydra.run.dir={tmp_path}/run"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["memory_peak"] >= row["memory"] > 2**20 and row["data_wait"] <= 1.0 for row in rows[:6])
    assert "mfu" not in rows[0]
    assert 0 < rows[5]["mfu"] < 1
    assert rows[5]["launches"] > 20
    at_end = result_of(tmp_path / "run")["measured"]["at_end"]
    assert at_end["samples_per_s"] > 0
    assert {"mfu", "data_wait", "launches", "memory_peak", "step_s"} <= at_end.keys()
    assert "targets_per_s" not in at_end
    assert {"mfu", "memory", "memory_peak", "launches", "data_wait"} <= {*read(tmp_path / "run").Tags()["scalars"]}


def test_mfu_is_the_work_of_the_samples_over_the_peak() -> None:
    instruments = Instruments(torch.device("cpu"))
    assert "mfu" not in instruments.figures(seconds=1.0, samples=10, targets=10.0, waited_s=0.0)
    instruments.set_work(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=70))
    figures = instruments.figures(seconds=2.0, samples=400, targets=400.0, waited_s=3.0)
    assert (figures["mfu"], figures["launches"], figures["data_wait"]) == (0.4, 70.0, 1.0)
    assert instruments.overall()["samples_per_s"] == 200.0  # without the first row
    instruments.set_work(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=None))  # a compiled run
    assert instruments.overall().keys() == figures.keys() - {"launches"}


def test_on_a_gpu_the_wait_for_data_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin", "__call__"):
        monkeypatch.setattr(PhaseClock, name, lambda *_: None)
    monkeypatch.setattr(PhaseClock, "lap", lambda _: {**dict.fromkeys(PARTS, 0.5), "input": 0.25})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 200)
    instruments, heard = Instruments(torch.device("cuda", 1)), list[str]()
    instruments.timed(lambda phase, _: heard.append(phase))("data", 0)
    assert heard == ["data"]
    figures = instruments.figures(seconds=2.5, samples=10, targets=10.0, waited_s=2.4)  # the host waited for the device
    assert (figures["data_wait"], figures["phase/forward"], figures["phase/input"]) == (0.1, 0.2, 0.1)
    assert (figures["memory"], figures["memory_peak"]) == (100.0, 200.0)


class NvmlError(Exception):
    """An error of the driver."""


def nvml(queries: list[int], *, power: int | None = 312_500) -> SimpleNamespace:
    """The driver of a machine with GPUs, whose handles are their numbers; without `power` it reports none."""

    def watts(_: object) -> int:
        if power is None:
            raise NvmlError
        return power

    def use(handle: bytes) -> SimpleNamespace:
        queries.append(int(handle.decode().removeprefix("GPU-")))
        return SimpleNamespace(gpu=87 - queries[-1])

    return SimpleNamespace(
        NVMLError=NvmlError, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None, nvmlDeviceGetPowerUsage=watts,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetUtilizationRates=use,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2**30), nvmlDeviceGetTemperature=lambda *_: 64,
    )  # fmt: skip


Start = Callable[..., tuple[Gpu, Run]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    def started(driver: object, *, gpus: int = 1, is_owner: bool = True) -> tuple[Gpu, Run]:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(gpu, "devices_of", lambda run: [torch.device("cuda", number) for number in range(gpus)])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
        callback, run = Gpu(), run_double(tmp_path, is_owner=is_owner)
        callback.run_start(run)
        return callback, run

    return started


def test_a_row_gets_the_figures_that_each_gpu_reports_in_their_units(start: Start) -> None:
    callback, run = start(nvml([]), gpus=2)
    figures = callback.row_figures(run)
    assert [figures[f"gpu/1/{name}"] for name in ("use", "memory", "power", "temperature")] == [0.86, 2**30, 312.5, 64]
    assert (figures["gpu/0/use"], len(figures)) == (0.87, 8)
    callback, run = start(nvml([], power=None))
    assert [*callback.row_figures(run)] == ["gpu/0/use", "gpu/0/memory", "gpu/0/temperature"]


def test_the_driver_is_asked_once_a_second_at_most_and_by_one_rank(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, seconds = list[int](), [100.0]
    monkeypatch.setattr("trainkit.callbacks.gpu.time.monotonic", lambda: seconds[0])
    callback, run = start(nvml(queries))
    sizes = []
    for seconds[0] in (100.0, 100.5, 101.0):
        sizes.append(len(callback.row_figures(run)))
    assert (sizes, queries) == ([4, 0, 4], [0, 0])
    callback, run = start(nvml(queries), is_owner=False)
    assert (dict(callback.row_figures(run)), queries) == ({}, [0, 0])


def test_a_row_has_the_figures_of_callbacks_and_keeps_those_of_the_trainer(tmp_path: Path) -> None:
    class Own(Callback):
        rows: ClassVar[list[Row]] = []

        def row_figures(self, run: Run) -> Row:
            return {"own": 1.0, "train/loss": 99.0}

        def log(self, run: Run, row: Row) -> None:
            self.rows.append(row)

    CallbackHooks([Own()]).log_row(run_double(tmp_path), {"step": 1, "train/loss": 0.5})
    assert Own.rows == [{"own": 1.0, "step": 1, "train/loss": 0.5}]


def profiled(run: Run, *, until: int, **settings: Any) -> Path:
    profiler = Profiler(**settings)
    profiler.run_start(run)
    for step in range(1, until + 1):
        torch.zeros(step).cumsum(0)
        run.state.step = step
        profiler.step_end(run, StepOutcome(step=step, status=Status.applied, loss_sum=None, weight=0.0))
    profiler.run_end(run, {})
    return run.folder / "profile"


def test_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    folder = profiled(run_double(tmp_path), until=9, skip_steps=2, num_steps=3)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 3
    assert "aten::cumsum" in (folder / "operations.txt").read_text()


def test_a_run_that_ends_within_the_recording_keeps_it_and_before_it_leaves_nothing(tmp_path: Path) -> None:
    assert not profiled(run_double(tmp_path), until=3, skip_steps=10).exists()
    folder = profiled(run_double(tmp_path), until=3, skip_steps=2, num_steps=30)
    assert {path.name for path in folder.iterdir()} == {"bottleneck.json", "operations.txt", "trace.json"}


def test_on_a_gpu_the_steps_are_timed_together_and_a_step_takes_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = iter([10.0, 16.0, 17.0]), list[torch.device]()
    monkeypatch.setattr(profiling, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(profiling, "wait_for", waits.append)
    monkeypatch.setattr(PhaseClock, "begin", lambda *_: None)
    monkeypatch.setattr(PhaseClock, "lap", lambda _: {"input": 0.3, "exchange": 0.6})
    run = run_double(tmp_path, is_owner=False)
    run.device = torch.device("cuda", 1)
    profile = json.loads((profiled(run, until=5, skip_steps=4, num_steps=9) / "rank_0.json").read_text())
    assert profile == {"steps": [2.0], "inputs": [pytest.approx(0.1)], "exchanges": [pytest.approx(0.2)]}
    assert waits == [run.device] * 2


def test_the_parts_of_two_threads_add_up_to_the_time_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread computes; the other makes the update of another worker's gradient meanwhile."""
    times = iter(range(100))
    monkeypatch.setattr(metrics_accumulator, "perf_counter", lambda: float(next(times)))
    clock = PhaseClock()
    clock.begin(torch.device("cpu"))

    def update() -> None:
        clock("update", 0)
        clock.end_step()

    updated = Thread(target=update)
    clock("forward", 0)
    updated.start()
    updated.join()
    clock("backward", 0)
    clock("reduce", 0)
    clock.end_step()
    assert clock.lap() == {"input": 0.0, "forward": 2.0, "backward": 1.0, "exchange": 1.0, "update": 1.0}


class Counting(nn.Module):
    """Counts its calls in Python up to a number, beyond which its code is the same."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.calls, self.most = 0, most

    def forward(self, x: Tensor) -> Tensor:
        self.calls = min(self.calls + 1, self.most)
        return x * self.calls


@pytest.mark.slow
@pytest.mark.parametrize(("most", "warnings"), [(9, 1), (3, 0)])
def test_a_count_in_python_that_compiles_each_step_again_is_said_once_with_its_reason(
    most: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    step = 10
    torch._dynamo.reset()
    times, model = CompileTime(lambda: step), torch.compile(Counting(most), backend="eager")
    try:
        with caplog.at_level(logging.WARNING, logger=CompileTime.__module__):
            for step in range(10, 18):  # noqa: B007 - the object reads it
                model(torch.ones(2))
    finally:
        times.close()
        torch._dynamo.reset()
    warned = [record.getMessage() for record in caplog.records if record.name == CompileTime.__module__]
    assert len(warned) == warnings
    assert all("again in steps 13, 14, 15, " in text and "Its reason: self.calls == " in text for text in warned)
    assert times.seconds > 0


READING = Reading(
    step=1240,
    num_steps=5800,
    row={"train/loss": 0.1234567, "samples_per_s": 412_345.0, "data_wait": 0.031},
    metric=("val/accuracy", 0.9722),
    remaining_s=12.3,
)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_last_line_comes_once_with_its_evaluation_and_earlier_values_name_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_double(tmp_path, step=80, eval={"metric": "val/accuracy", "mode": "max"})
    progress = Progress(every_s=1e-9)
    progress.eval_end(run, {"step": 80, "val/loss": 9.0, "val/accuracy": 0.3})
    for step in (90, 100):
        run.state.step = step
        progress.log(run, row(step))
    progress.eval_end(run, {"step": 100, "val/loss": 9.0, "val/accuracy": 0.2})
    progress.run_end(run, {})
    assert [line.partition("  412 k")[0] for line in printed(capsys)] == [
        "step 80/100   80 %  val/accuracy 0.3000",
        "step 90/100   90 %  loss 0.5000  val/accuracy 0.3000 of step 80",
        "step 100/100  100 %  loss 0.5000  val/accuracy 0.2000",
    ]


def test_a_plain_line_shows_all_known_values_and_leaves_out_the_others() -> None:
    assert plain_text(READING) == (
        "step 1,240/5,800   21 %  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left"
    )
    assert plain_text(Reading(step=1, num_steps=10)) == "step 1/10   10 %"
    more = {"targets_per_s": 512_000.0, "mfu": 0.41, "memory": 3.0 * 2**30, "memory_peak": 2.0**32, "launches": 312.0}
    speed = plain_text(replace(READING, row={**READING.row, **more}))
    assert speed.endswith("512 k targets/s  MFU 41 %  3 GiB, peak 4 GiB  312 launches a step  0:12 left")


def test_plain_lines_come_every_few_seconds_and_the_last_always() -> None:
    seconds, lines = [0.0], list[str]()
    line = RepeatedLine(lambda text: lines.append(plain_text(text)), every_s=5.0, clock=lambda: seconds[0])
    for step in range(1, 10):
        seconds[0] = step * 2.0
        line.update(Reading(step=step, num_steps=9))
    line.close()
    line.close()
    assert [text.split()[1] for text in lines] == ["1/9", "4/9", "7/9", "9/9"]


def drawn() -> str:
    """What a terminal with colours is sent."""
    file = io.StringIO()
    console = Console(file=file, width=110, force_terminal=True, color_system="truecolor")
    line = TerminalLine(console, step_now=lambda: 1250)
    line.update(READING)
    line.close()
    return file.getvalue()


def test_the_bar_shows_the_step_of_this_moment_and_no_colours_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;m]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(drawn())
    assert "1,250/5,800  loss 0.1235" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn())


def test_a_notebook_gets_a_bar_whose_texts_are_no_html() -> None:
    html = as_html(Reading(step=10, num_steps=20, metric=("val/<b>acc", 0.9), remaining_s=75.0))["text/html"]
    assert "<progress max='1' value='0.5000' aria-label='step 10 of 20'></progress>" in html
    assert "val/&lt;b&gt;acc 0.9000" in html
    assert "1:15 left" in html


@pytest.mark.parametrize("pause_every", [40, 100])
def test_after_a_third_of_a_run_with_pauses_the_remaining_time_is_known_within_a_tenth(pause_every: int) -> None:
    seconds, pace, estimate, estimated_at = 0.0, Pace(last_step=1000, step=0, moment=0.0), math.nan, 0.0
    for step in range(1, 1001):
        seconds += 4.0 if step == 1 else 0.05
        if step % 10 == 0:
            pace.row(step, now=seconds)
        if step == 330:
            estimate, estimated_at = pace.remaining_s(now=seconds), seconds
        seconds += 1.1 * (step % pause_every == 0)
    assert estimate / (seconds - estimated_at) == pytest.approx(1.0, abs=0.1)


def test_a_slow_start_is_forgotten_and_a_finished_run_has_nothing_left() -> None:
    pace = Pace(last_step=10_000, step=0, moment=0.0)
    pace.row(1, now=100.0)
    for second in range(101, 201):
        pace.row(1 + 10 * (second - 100), now=float(second))
    assert pace.remaining_s(now=200.0) == pytest.approx((10_000 - 1001) / 10)
    assert Pace(last_step=7, step=7, moment=0.0).remaining_s(now=5.0) == 0.0


def test_the_line_counts_down_through_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr("trainkit.callbacks.progress.time.monotonic", lambda: seconds[0])
    run, progress = run_double(tmp_path), Progress(every_s=1e-9)
    run.begun_moment = 0.0
    seconds[0] = 1.0
    run.state.step = 10
    progress.log(run, row(10))  # 10 steps in a second, as the row says: 9 s for the other 90
    seconds[0] = 3.0
    progress.eval_end(run, {"val/loss": 1.0})
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == ["0:09 left", "0:07 left"]


SHORT = ("steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "eval.every_steps=2", "eval.every_epochs=null")


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    return trainkit.train([*SHORT, *overrides], run_dir=folder)


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "run"
    train(folder, "recipe=digits", "callbacks=[confusion,sample_pictures]")
    return folder


def test_each_evaluation_counts_every_sample_once_and_the_last_one_is_drawn_and_shown(shown_run: Path) -> None:
    tables = [json.loads(line) for line in (shown_run / "tables.jsonl").read_text().splitlines()]
    confusions = [table for table in tables if table["name"] == "val/confusion"]
    counts = [[row[1:] for row in table["rows"]] for table in confusions]
    assert ([table["step"] for table in confusions], [sum(map(sum, rows)) for rows in counts]) == ([2, 4], [360, 360])
    right = sum(row[label] for label, row in enumerate(counts[1])) / 360
    assert result_of(shown_run)["metrics"]["val/accuracy"] == pytest.approx(right, abs=1e-12)
    picture = EventAccumulator(str(shown_run / "tensorboard/samples")).Reload().Images("worst_val")[-1]
    assert (picture.step, picture.width, picture.height) == (4, 832, 280)
    figures = shown(shown_run / "report.html")["figures"]
    (matrix,), (samples,) = figures["confusion"], figures["samples"]
    assert (matrix["split"], matrix["step"], matrix["samples"], matrix["counts"]) == ("val", 4, 360, counts[1])
    assert samples["picture"].startswith("data:image/png;base64,")


def test_no_weight_changes_and_another_fingerprint_is_not_made(shown_run: Path, tmp_path: Path) -> None:
    plain, with_them = (
        train(tmp_path, "recipe=digits", "callbacks=[]"),
        result_of(shown_run),
    )
    for key in ("weights_sha256", "fingerprint"):
        assert plain[key] == with_them[key]


@pytest.mark.parametrize(
    ("callback", "overrides", "text"),
    [
        ("confusion", ["recipe=friedman"], "needs classes"),
        ("sample_pictures", ["recipe=friedman"], "needs the loss of each sample"),
        ("sample_pictures", ["recipe=shakespeare", "data=python_source"], "needs images"),
    ],
)
def test_what_has_no_classes_or_images_is_refused_before_anything_starts(
    callback: str, overrides: list[str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"callbacks.{callback}: {text}")):
        train(tmp_path / "run", *overrides, f"callbacks=[{callback}]")
    assert not (tmp_path / "run").exists()


def test_a_worst_sample_is_drawn_with_its_class_guess_and_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Animals:
        classes = ("cat", "dog")

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((3, 4, 4), float(index)), 1

    shown_captions = list[Sequence[str]]()

    def keep(images: Sequence[Any], captions: Sequence[Sequence[str]]) -> Any:
        shown_captions.extend(captions)
        return captioned(images, captions)

    monkeypatch.setattr("trainkit.callbacks.figures.captioned", keep)
    callback, run = SamplePictures(), run_double(tmp_path)
    run.datasets = {"val": Animals()}
    table = Table(columns=("sample", "loss", "target", "guess", "probability"), rows=((7, 4.0, 1.0, 0.0, 0.98),))
    callback.eval_tables(run, {"val/worst": table, "other/worst": table})
    callback.run_end(run, {})
    assert shown_captions == [("dog", "guess cat", "98 %")]
    assert (tmp_path / "plots/worst_val.png").read_bytes().startswith(b"\x89PNG")
    assert dataset_of(run, "val_ema") is run.datasets["val"]


def test_a_run_leaves_a_picture_of_its_losses(tmp_path: Path) -> None:
    run, file, drawn = run_double(tmp_path, step=10), MetricsFile(), Plots()
    file.log(run, row(10))
    file.eval_end(run, {"val/loss": 0.4, "val/accuracy": 0.9})
    for callback in (file, drawn):
        callback.run_end(run, {})
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.png"]


def test_the_curve_of_the_rate_has_the_first_and_the_last_step() -> None:
    for num_steps in (1, 3, 601):
        points = [step for step, _ in lr_points(lambda step: 0.1, num_steps)]
        assert (points[0], points[-1], len(points)) == (0, num_steps - 1, min(600, num_steps))


FOUR_STEPS = ("recipe=null", "steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "batch.global_size=32")
EACH = ("callbacks=[histograms]", "callbacks.histograms.every_steps=2")


def hashes_of(folder: Path, *overrides: str) -> list[str]:
    """Hash of the weights, and the fingerprint."""
    result = trainkit.train([*FOUR_STEPS, *overrides], run_dir=folder)
    return [result["weights_sha256"], result["fingerprint"]]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "histograms.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run_with_histograms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with histograms, whose weights and fingerprint are those of a run without."""
    folder = tmp_path_factory.mktemp("histograms")
    assert hashes_of(folder / "shown", *EACH) == hashes_of(folder / "plain", "callbacks=[]")
    return folder / "shown"


@pytest.mark.slow
def test_the_first_step_and_each_that_divides_are_recorded_and_shown_by_tensorboard(
    run_with_histograms: Path,
) -> None:
    recorded = records(run_with_histograms)
    assert [row["step"] for row in recorded] == [1, 2, 4]
    assert [*recorded[0]] == ["step", "gradients", "activations", "weights"]
    assert [*recorded[0]["gradients"]] == [*recorded[0]["weights"]]
    events = EventAccumulator(
        str(run_with_histograms / "tensorboard/histograms"), size_guidance={"histograms": 0}
    ).Reload()
    names = {f"{kind}/{name}" for kind in recorded[0] if kind != "step" for name in recorded[0][kind]}
    assert {*events.Tags()["histograms"]} == names
    assert [event.step for event in events.Histograms(min(names))] == [1, 2, 4]


def test_the_gradient_is_the_one_of_the_update_whatever_the_shards_and_the_loss_scale(
    run_with_histograms: Path, tmp_path: Path
) -> None:
    hashes_of(tmp_path / "run", *EACH, "batch.micro_size=8", "precision=fp16_mixed")
    whole, cut = records(run_with_histograms)[0], records(tmp_path / "run")[0]
    for kind in ("gradients", "activations"):
        for name, stats in whole[kind].items():
            assert cut[kind][name]["rms"] == pytest.approx(stats["rms"], rel=0.02)  # a few times 2^-10, a step of fp16


def test_activations_alone_are_recorded(tmp_path: Path) -> None:
    hashes_of(tmp_path / "run", *EACH, "callbacks.histograms.kinds=[activations]")
    assert [[*row] for row in records(tmp_path / "run")] == [["step", "activations"]] * 3


def test_a_resumed_run_drops_the_records_of_steps_that_it_trains_again(tmp_path: Path) -> None:
    (tmp_path / "histograms.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 4)))
    Histograms().run_start(run_double(tmp_path, step=2))
    assert [row["step"] for row in records(tmp_path)] == [1, 2]


def test_values_are_counted_in_the_bucket_that_holds_them_and_what_is_not_finite_apart() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, -3.0, 4.0, float("nan"), float("inf")])
    distribution = Distribution.of(*measure(values))
    shown = distribution.to_json()
    assert (distribution.num_finite, shown["nonfinite"], shown["zero_share"]) == (5, 2, 0.2)
    assert (distribution.total, distribution.squares, distribution.low, distribution.high) == (1.0, 27.0, -3.0, 4.0)
    assert distribution.quantiles((0.2, 1.0)) == [0.0, pytest.approx(4.0, rel=0.1)]
    limits, counts = distribution.buckets()
    uppers = [limit for limit, count in zip(limits, counts, strict=True) for _ in range(count)]
    for value, upper in zip((-3.0, -1.0, 0.0, 1.0), uppers, strict=False):
        assert value <= upper <= value + 0.2 * abs(value) + 1e-9  # a quarter of an octave
    assert (limits, len(uppers), uppers[-1]) == (sorted(limits), 5, 4.0)


def test_values_beyond_the_buckets_and_empty_tensors_are_counted() -> None:
    distribution = Distribution.of(*measure(torch.tensor([1e-30, -1e30], dtype=torch.bfloat16)))
    assert (distribution.num_finite, sum(distribution.buckets()[1])) == (2, 2)
    empty = Distribution.of(*measure(torch.zeros(0)))
    assert (empty.num_finite, empty.buckets(), empty.to_json()["quantiles"]) == (0, ([], []), None)


def test_buckets_of_parts_add_up_to_those_of_the_whole() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Two(LocalCollective):
        """Adds what the other of two ranks holds."""

        other: torch.Tensor

        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + measure(self.other)[0]

        def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            return [tensor, measure(self.other)[1][None]]

    whole = torch.randn(100, generator=torch.Generator().manual_seed(0))
    total = summed({"w": measure(whole[:30])}, {"w": True}, Two(other=whole[30:]))["w"]
    expected = measure(whole)
    assert torch.equal(total[0][:NUM_COUNTS], expected[0][:NUM_COUNTS])
    assert torch.equal(total[1], expected[1])
    copied = summed({"w": measure(whole)}, {"w": False}, Two(other=whole))["w"]
    assert int(copied[0][:NUM_COUNTS].sum()) == 100  # a copy of another rank's part counts once


def started(folder: Path, model: nn.Module, **settings: Any) -> tuple[Run, Histograms]:
    run, callback = run_double(folder, step=1), Histograms(**settings)
    run.model = model
    callback.run_start(run)
    return run, callback


def test_a_step_that_is_not_recorded_or_left_out_has_no_hook_and_takes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    run, callback = started(tmp_path, model, every_steps=10)
    for step, hooks in ((0, 1), (1, 0), (8, 0), (9, 1), (10, 0)):
        callback.phase_listener()("data", step)
        assert (callback.gradient_listener().wants(step), len(model[0]._forward_hooks)) == (bool(hooks), hooks)
        callback.step_end(run, None)  # type: ignore[arg-type] # not read
        assert not model[0]._forward_hooks
    assert not (tmp_path / "histograms.jsonl").exists()


def test_what_backward_computes_again_counts_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    _, callback = started(tmp_path, model, every_steps=1)
    for phase in ("data", "forward", "backward"):
        callback.phase_listener()(phase, 0)
        model(torch.ones(5, 2))
    (counted,) = callback._recorder._results["activations"].values()
    assert int(counted[0][:NUM_COUNTS].sum()) == 15


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("strategy=local_sgd", "not under LocalSgd"),
        ("compile.mode=default", "records no gradient with compile.mode=default"),
        ("callbacks.histograms.kinds=[]", "callbacks.histograms.kinds=[]: is empty"),
    ],
)
def test_where_nothing_can_be_shown_the_run_is_refused_before_it_starts(
    override: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        hashes_of(tmp_path / "run", "callbacks=[histograms]", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_two_ranks_count_what_one_counts(strategy: str, run_with_histograms: Path, tmp_path: Path) -> None:
    of_two = [f"strategy={strategy}", "strategy.replicas=2", "batch.micro_size=16"]
    assert hashes_of(tmp_path / "run", *EACH, *of_two) == hashes_of(tmp_path / "plain", "callbacks=[]", *of_two)
    alone, two = records(run_with_histograms), records(tmp_path / "run")
    assert [row["step"] for row in two] == [1, 2, 4]
    for name, grad in alone[0]["gradients"].items():
        assert two[0]["gradients"][name]["rms"] == pytest.approx(grad["rms"], rel=1e-4)  # fp32 sums in another order
    assert two[0]["weights"] == alone[0]["weights"]
