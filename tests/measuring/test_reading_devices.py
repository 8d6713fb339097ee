"""What is read from a GPU and its driver, with doubles: a clock that waits in each step is caught here alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from trainkit.callbacks.energy import consumed_joules
from trainkit.trainer import phase_clock
from trainkit.trainer.phase_clock import PhaseClock


class Event:
    """An event of a stream whose device is always late: each event is reached 10 ms after the one before."""

    reached_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "the stream of cuda:1"
        Event.reached_ms += 10.0
        self.at_ms = Event.reached_ms

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_parts_on_a_gpu_are_measured_between_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[None]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append(None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = PhaseClock()
    clock.begin(torch.device("cuda", 1))
    for _ in range(2):
        for phase in ("data", "forward", "backward", "forward", "backward", "reduce", "update"):
            clock(phase, 0)
        clock.end_step()
    assert waits == []
    found = {"input": 0.02, "forward": 0.04, "backward": 0.04, "exchange": 0.02, "update": 0.02}
    assert clock.lap() == pytest.approx(found)
    assert len(waits) == 1
    assert clock.lap() == dict.fromkeys(found, 0.0)


def test_events_that_the_device_has_reached_are_added_up_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(phase_clock, "_MOST_EVENTS", 8)
    monkeypatch.setattr(Event, "query", lambda event: event.at_ms < Event.reached_ms, raising=False)
    clock = PhaseClock()
    clock.begin(torch.device("cuda", 1))
    for _ in range(20):
        clock("forward", 0)
        clock("backward", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    found = clock.lap()
    assert (found["forward"], found["backward"]) == pytest.approx((0.2, 0.19))


def test_the_energy_is_that_of_the_devices_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError

    devices, millijoules = [torch.device("cuda", index) for index in (0, 1)], {b"GPU-0": 1500, b"GPU-1": 500}
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert consumed_joules(devices) == 2.0
    nvml.nvmlInit = refuse
    assert consumed_joules(devices) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert consumed_joules(devices) is None
