"""`trainkit calibrate`: the figures of this machine in a file of the user."""

import json
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.run.estimates import calibrating
from trainkit.run.estimates.hardware import Link
from trainkit.run.estimates.this_machine import Machine, ThisMachine, calibration_file


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrating, "_ROUND_S", 1e-4)
    monkeypatch.setattr(calibrating, "_ROUNDS", 1)
    return tmp_path


@pytest.mark.slow
def test_calibrate_writes_what_hardware_this_takes(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "measured_link", lambda *, num_gpus: Link(gb_s=1.5, latency_us=40.0 + num_gpus))
    assert main(["calibrate"]) == 0
    path = calibration_file(Machine.here())
    assert path.parent.parent == quick
    assert str(path) in capsys.readouterr().out
    found = ThisMachine().here()
    written = json.loads(path.read_text())
    assert {"fp64", "fp32", "bf16"} <= found.tflops.keys()
    assert (found.within_host, found.date["tflops"]) == (Link(gb_s=1.5, latency_us=40.0), written["date"])
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_calibrate_takes_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "gpu"]) == 2
    expected = "  calibrate: takes 0 arguments, and got gpu. Set a key by key=value. (command line)\n"
    assert expected in capsys.readouterr().err


@pytest.mark.long
def test_a_link_is_measured_between_two_processes(quick: Path) -> None:
    found = calibrating.measured_link(num_gpus=0)
    assert found.gb_s > 0
    assert found.latency_us > 0
