"""A GPU figure in the wrong unit or of another device, or a driver asked at every row, is caught here alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.callbacks.run_double import run_double
from trainkit.callbacks import gpu
from trainkit.callbacks.gpu import Gpu
from trainkit.errors import ConfigError
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.loop import CallbackHooks


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


def test_a_row_gets_the_figures_of_each_gpu_in_their_units(start: Start) -> None:
    callback, run = start(nvml([]), gpus=2)
    found = callback.row_figures(run)
    assert [found[f"gpu/1/{name}"] for name in ("use", "memory", "power", "temperature")] == [0.86, 2**30, 312.5, 64]
    assert (found["gpu/0/use"], len(found)) == (0.87, 8)


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


def test_what_a_gpu_does_not_report_is_left_out(start: Start) -> None:
    callback, run = start(nvml([], power=None))
    assert [*callback.row_figures(run)] == ["gpu/0/use", "gpu/0/memory", "gpu/0/temperature"]


def test_an_absent_package_is_named_and_a_run_without_a_gpu_says_so_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"needs the package nvidia-ml-py\. Install it: "):
        start(None)
    with caplog.at_level(logging.WARNING):
        callback, run = start(nvml([]), gpus=0)
        assert [dict(callback.row_figures(run)) for _ in range(3)] == [{}, {}, {}]
    assert caplog.messages == ["callbacks=[gpu] records nothing: rank 0 trains on cpu."]


def test_a_row_has_the_figures_of_callbacks_and_keeps_those_of_the_trainer(tmp_path: Path) -> None:
    class Own(Callback):
        rows: ClassVar[list[Row]] = []

        def row_figures(self, run: Run) -> Row:
            return {"own": 1.0, "train/loss": 99.0}

        def log(self, run: Run, row: Row) -> None:
            self.rows.append(row)

    class Failing(Callback):
        observes: ClassVar[bool] = True

        def row_figures(self, run: Run) -> Row:
            raise ValueError("no driver")

    hooks = CallbackHooks([Failing(), Own()])
    for _ in range(2):
        hooks.log_row(run_double(tmp_path), {"step": 1, "train/loss": 0.5})
    assert Own.rows == [{"own": 1.0, "step": 1, "train/loss": 0.5}] * 2
    assert [one["hook"] for one in hooks.failures] == ["row_figures"]
