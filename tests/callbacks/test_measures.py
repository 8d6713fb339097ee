"""A figure of speed, memory, a GPU or a phase in the wrong unit, of another device or of other steps is caught here
alone.
A progress line of another step, one that colours a pipe or is printed too often, and a remaining time that counts a
save beside an evaluation twice or a slow first step for ever are caught here alone.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from tests.callbacks.run_double import row, run_double
from tests.callbacks.test_tensorboard import read
from trainkit.callbacks import gpu
from trainkit.callbacks import profiler as profiling
from trainkit.callbacks.every_run import CompileTime
from trainkit.callbacks.gpu import Gpu
from trainkit.callbacks.profiler import Profiler
from trainkit.callbacks.progress import Pace, Progress, Reading, RepeatedLine, TerminalLine, as_html, plain_text
from trainkit.cli import main
from trainkit.strategies.base import Status, StepOutcome
from trainkit.trainer import metrics_accumulator
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.loop import CallbackHooks
from trainkit.trainer.metrics_accumulator import PARTS, CountedWork, Instruments, PhaseClock


@pytest.mark.slow
def test_a_run_shows_what_its_steps_take(tmp_path: Path) -> None:
    run = ["recipe=digits", "steps=30", "log_every_steps=5", "hardware=laptop", "quiet=true", "checkpoint.export=false"]
    assert main([*run, "eval.every_epochs=null", f"hydra.run.dir={tmp_path}/run"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["memory_peak"] >= row["memory"] > 2**20 and row["data_wait"] <= 1.0 for row in rows[:6])
    assert "mfu" not in rows[0]
    assert 0 < rows[5]["mfu"] < 1
    assert rows[5]["launches"] > 20
    at_end = json.loads((tmp_path / "run/result.json").read_text())["measured"]["at_end"]
    assert at_end["samples_per_s"] > 0
    assert {"mfu", "data_wait", "launches", "memory_peak", "step_s"} <= at_end.keys()
    assert "targets_per_s" not in at_end
    curves = {*read(tmp_path / "run").Tags()["scalars"]}
    assert {"mfu", "memory", "memory_peak", "launches", "data_wait"} <= curves


def test_mfu_is_the_work_of_the_samples_over_the_peak() -> None:
    instruments = Instruments(torch.device("cpu"))
    assert "mfu" not in instruments.figures(seconds=1.0, samples=10, targets=10.0, waited_s=0.0)
    instruments.know(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=70))
    found = instruments.figures(seconds=2.0, samples=400, targets=400.0, waited_s=3.0)
    assert (found["mfu"], found["launches"], found["data_wait"]) == (0.4, 70.0, 1.0)
    assert instruments.overall()["samples_per_s"] == 200.0  # without the first row
    instruments.know(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=None))  # a compiled run
    assert instruments.overall().keys() == found.keys() - {"launches"}


def test_on_a_gpu_the_wait_for_data_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin", "__call__"):
        monkeypatch.setattr(PhaseClock, name, lambda *_: None)
    monkeypatch.setattr(PhaseClock, "lap", lambda _: {**dict.fromkeys(PARTS, 0.5), "input": 0.25})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 200)
    instruments, heard = Instruments(torch.device("cuda", 1)), list[str]()
    instruments.heard(lambda phase, _: heard.append(phase))("data", 0)
    assert heard == ["data"]
    found = instruments.figures(seconds=2.5, samples=10, targets=10.0, waited_s=2.4)  # the host waited for the device
    assert (found["data_wait"], found["phase/forward"], found["phase/input"]) == (0.1, 0.2, 0.1)
    assert (found["memory"], found["memory_peak"]) == (100.0, 200.0)


class NvmlError(Exception):
    """An error of the driver."""


def nvml(asked: list[int], *, power: int | None = 312_500) -> SimpleNamespace:
    """The driver of a machine with GPUs, whose handles are their numbers; without `power` it reports none."""

    def watts(_: object) -> int:
        if power is None:
            raise NvmlError
        return power

    def use(handle: bytes) -> SimpleNamespace:
        asked.append(int(handle.decode().removeprefix("GPU-")))
        return SimpleNamespace(gpu=87 - asked[-1])

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
    found = callback.row_figures(run)
    assert [found[f"gpu/1/{name}"] for name in ("use", "memory", "power", "temperature")] == [0.86, 2**30, 312.5, 64]
    assert (found["gpu/0/use"], len(found)) == (0.87, 8)
    callback, run = start(nvml([], power=None))
    assert [*callback.row_figures(run)] == ["gpu/0/use", "gpu/0/memory", "gpu/0/temperature"]


def test_the_driver_is_asked_once_a_second_at_most_and_by_one_rank(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, now = list[int](), [100.0]
    monkeypatch.setattr("trainkit.callbacks.gpu.time.monotonic", lambda: now[0])
    callback, run = start(nvml(asked))
    sizes = []
    for now[0] in (100.0, 100.5, 101.0):
        sizes.append(len(callback.row_figures(run)))
    assert (sizes, asked) == ([4, 0, 4], [0, 0])
    callback, run = start(nvml(asked), is_owner=False)
    assert (dict(callback.row_figures(run)), asked) == ({}, [0, 0])


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
    found = json.loads((profiled(run, until=5, skip_steps=4, num_steps=9) / "rank_0.json").read_text())
    assert found == {"steps": [2.0], "inputs": [pytest.approx(0.1)], "exchanges": [pytest.approx(0.2)]}
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
    found = [record.getMessage() for record in caplog.records if record.name == CompileTime.__module__]
    assert len(found) == warnings
    assert all("again in steps 13, 14, 15, " in text and "Its reason: self.calls == " in text for text in found)
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
    now, lines = [0.0], list[str]()
    line = RepeatedLine(lambda one: lines.append(plain_text(one)), every_s=5.0, clock=lambda: now[0])
    for step in range(1, 10):
        now[0] = step * 2.0
        line.update(Reading(step=step, num_steps=9))
    line.close()
    line.close()
    shown = [text.split()[1] for text in lines]
    assert shown == ["1/9", "4/9", "7/9", "9/9"]


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
    now, pace, estimate, estimated_at = 0.0, Pace(last_step=1000, step=0, moment=0.0), math.nan, 0.0
    for step in range(1, 1001):
        now += 4.0 if step == 1 else 0.05
        if step % 10 == 0:
            pace.row(step, now=now)
        if step == 330:
            estimate, estimated_at = pace.remaining_s(now=now), now
        now += 1.1 * (step % pause_every == 0)
    assert estimate / (now - estimated_at) == pytest.approx(1.0, abs=0.1)


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
    now = [0.0]
    monkeypatch.setattr("trainkit.callbacks.progress.time.monotonic", lambda: now[0])
    run, progress = run_double(tmp_path), Progress(every_s=1e-9)
    run.begun_moment = 0.0
    now[0] = 1.0
    run.state.step = 10
    progress.log(run, row(10))  # 10 steps in a second, as the row says: 9 s for the other 90
    now[0] = 3.0
    progress.eval_end(run, {"val/loss": 1.0})
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == ["0:09 left", "0:07 left"]
