"""Speed and memory in the rows of a training, on the live line and in its result."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from trainkit.callbacks.screen.reading import Reading, plain_text, terminal_parts
from trainkit.cli import main
from trainkit.trainer import metrics_accumulator as module
from trainkit.trainer.metrics_accumulator import CountedWork, Instruments
from trainkit.trainer.phase_clock import PARTS


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
    assert {"mfu", "memory", "memory_peak", "launches", "data_wait"} <= curves_of(tmp_path / "run")


def curves_of(folder: Path) -> set[str]:
    """The names of the curves that TensorBoard shows of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
    return set(events.Tags()["scalars"])


def test_tokens_a_second_are_a_curve_of_a_language_model(tmp_path: Path) -> None:
    small = ["model.num_layers=1", "model.width=8", "model.num_heads=1", "data.max_bytes=20_000", "batch.global_size=4"]
    run = ["recipe=python_source", *small, "steps=1", "callbacks=[]", "quiet=true", "checkpoint.export=false"]
    assert main([*run, "warmup.steps=0", "eval.every_steps=null", f"hydra.run.dir={tmp_path}/run"]) == 0
    assert "targets_per_s" in curves_of(tmp_path / "run")


def test_mfu_is_the_work_of_the_samples_over_the_peak() -> None:
    instruments = Instruments(torch.device("cpu"))
    assert "mfu" not in instruments.figures(seconds=1.0, samples=10, targets=10.0, waited_s=0.0)
    instruments.know(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=70))
    found = instruments.figures(seconds=2.0, samples=400, targets=400.0, waited_s=3.0)
    assert (found["mfu"], found["launches"], found["data_wait"]) == (0.4, 70.0, 1.0)
    assert instruments.overall()["samples_per_s"] == 200.0  # without the first row
    instruments.know(CountedWork(flops_a_sample=2e9, peak_flops=1e12, launches=None))  # a compiled run
    assert instruments.overall().keys() == found.keys() - {"launches"}


class Clock:
    """Stands for the events of a device."""

    heard: list[str]

    def __init__(self) -> None:
        self.heard = []

    def begin(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def __call__(self, phase: str, step: int) -> None:
        self.heard.append(phase)

    def lap(self) -> dict[str, float]:
        return {**dict.fromkeys(PARTS, 0.5), "input": 0.25}


def test_on_a_gpu_the_wait_for_data_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "PhaseClock", lambda: clock)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 200)
    instruments, heard = Instruments(torch.device("cuda", 1)), list[str]()
    instruments.heard(lambda phase, _: heard.append(phase))("data", 0)
    assert clock.heard == heard == ["data"]
    found = instruments.figures(seconds=2.5, samples=10, targets=10.0, waited_s=2.4)  # the host waited for the device
    assert (found["data_wait"], found["phase/forward"], found["phase/input"]) == (0.1, 0.2, 0.1)
    assert (found["memory"], found["memory_peak"]) == (100.0, 200.0)


def test_on_the_cpu_no_phase_is_timed() -> None:
    def listen(phase: str, step: int) -> None:
        """Stand for a heartbeat."""

    assert Instruments(torch.device("cpu")).heard(listen) is listen


def test_the_live_line_shows_them_and_drops_the_least_important_first() -> None:
    reading = Reading(
        step=10, num_steps=20, samples_per_s=500.0, data_wait=0.03, targets_per_s=512_000.0, mfu=0.41,
        memory=(3.0 * 2**30, 4.0 * 2**30), launches=312.0,
    )  # fmt: skip
    shown = "500 samples/s  data wait 3 %  512 k targets/s  MFU 41 %  3 GiB, peak 4 GiB  312 launches a step"
    assert plain_text(reading).endswith(shown)
    for width, last in ((70, "312 launches"), (60, "3 GiB"), (45, "512 k targets/s")):
        assert [text for text, _ in terminal_parts(reading, step=10, width=width)][-1] == last
