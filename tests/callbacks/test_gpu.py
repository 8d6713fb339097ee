from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.callbacks.run_double import run_double
from trainkit.callbacks import gpu
from trainkit.callbacks.gpu import Gpu
from trainkit.errors import ConfigError
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.loop import CallbackHooks


class NvmlDouble:
    """The driver of a machine with GPUs, whose handles are their numbers."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, reports_power: bool = True) -> None:
        self.reports_power, self.asked = reports_power, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> bytes:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: bytes) -> Any:
        self.asked += 1
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, handle: bytes) -> Any:
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetPowerUsage(self, handle: bytes) -> int:
        if not self.reports_power:
            raise self.NVMLError
        return 312_500

    def nvmlDeviceGetTemperature(self, handle: bytes, sensor: int) -> int:
        return 64


Start = Callable[..., tuple[Gpu, Run]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    def started(nvml: object, *, gpus: int = 1, is_owner: bool = True) -> tuple[Gpu, Run]:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(gpu, "devices_of", lambda run: [torch.device("cuda", number) for number in range(gpus)])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
        callback, run = Gpu(), run_double(tmp_path, is_owner=is_owner)
        callback.run_start(run)
        return callback, run

    return started


def test_a_row_gets_the_figures_of_each_gpu_in_their_units(start: Start) -> None:
    callback, run = start(NvmlDouble(), gpus=2)
    found = callback.row_figures(run)
    assert {name: value for name, value in found.items() if name.startswith("gpu/1/")} == {
        "gpu/1/use": 0.87,
        "gpu/1/memory": 2.0**30,
        "gpu/1/power": 312.5,
        "gpu/1/temperature": 64.0,
    }
    assert len(found) == 8


def test_the_driver_is_asked_once_a_second_at_most(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, now = NvmlDouble(), [100.0]
    monkeypatch.setattr("trainkit.callbacks.gpu.time.monotonic", lambda: now[0])
    callback, run = start(nvml)
    rows = []
    for now[0] in (100.0, 100.5, 101.0):
        rows.append(len(callback.row_figures(run)))
    assert (rows, nvml.asked) == ([4, 0, 4], 2)


def test_what_a_gpu_does_not_report_is_left_out(start: Start) -> None:
    callback, run = start(NvmlDouble(reports_power=False))
    assert [*callback.row_figures(run)] == ["gpu/0/use", "gpu/0/memory", "gpu/0/temperature"]


def test_an_absent_package_is_named_with_the_line_that_installs_it(start: Start) -> None:
    with pytest.raises(ConfigError, match=r'needs the package nvidia-ml-py. Install it: pip install "nvidia-ml-py>='):
        start(None)


def test_a_run_without_a_gpu_says_so_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        callback, run = start(NvmlDouble(), gpus=0)
        assert [dict(callback.row_figures(run)) for _ in range(3)] == [{}, {}, {}]
    assert [one.getMessage() for one in caplog.records] == ["callbacks=[gpu] records nothing: rank 0 trains on cpu."]


def test_other_ranks_make_no_calls_to_the_driver(start: Start) -> None:
    nvml = NvmlDouble()
    callback, run = start(nvml, is_owner=False)
    assert (dict(callback.row_figures(run)), nvml.asked) == ({}, 0)


def test_a_driver_that_fails_later_costs_the_figures_and_not_the_run(start: Start) -> None:
    nvml = NvmlDouble()
    callback, run = start(nvml)
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 1 // 0  # type: ignore[method-assign]
    hooks = CallbackHooks([callback])
    (figures,) = hooks.of("row_figures")
    assert [figures(run), figures(run)] == [None, None]
    assert [one["hook"] for one in hooks.failures] == ["row_figures"]


def test_a_row_has_the_figures_of_callbacks_and_keeps_those_of_the_trainer(tmp_path: Path) -> None:
    class Own(Callback):
        rows: ClassVar[list[Row]] = []

        def row_figures(self, run: Run) -> Row:
            return {"own": 1.0, "train/loss": 99.0}

        def log(self, run: Run, row: Row) -> None:
            self.rows.append(row)

    CallbackHooks([Own()]).log_row(run_double(tmp_path), {"step": 1, "train/loss": 0.5})
    assert Own.rows == [{"own": 1.0, "step": 1, "train/loss": 0.5}]
