"""A run that takes the rates of another GPU, or of another machine's calibration, is caught here alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.present import present
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.config.yaml_files import shipped_conf
from trainkit.errors import ConfigError
from trainkit.run.estimates import calibrating
from trainkit.run.estimates.hardware import Link, hardware_of, hardware_under
from trainkit.run.estimates.this_machine import Calibration, Machine, ThisMachine, calibration_file

CHOICES = sorted(path.stem for path in (shipped_conf() / "hardware").glob("*.yaml"))
SHIPPED = [name for name in CHOICES if name not in ("none", "this")]


def node_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((shipped_conf() / "hardware" / f"{name}.yaml").read_text())
    return found


def test_every_figure_has_a_source_and_a_date_and_every_kind_its_own_names() -> None:
    names = [name for choice in SHIPPED for name in node_of(choice).get("driver_names", ())]
    assert len(names) == len(set(names))
    for choice in SHIPPED:
        node = node_of(choice)
        figures = {key for key, value in node.items() if value is not None} - {
            "_target_", "name", "driver_names", "whole_host", "source", "date",
        }  # fmt: skip
        assert figures == node["source"].keys() == node["date"].keys(), choice
        assert present(hardware_of(RunConfig(hardware=node))).peak_flops("bf16_mixed"), choice


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [("NVIDIA H200", "NVIDIA H200 SXM"), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA L40S", None)],
)
def test_a_run_takes_the_rates_of_its_gpu_by_the_name_of_the_driver(
    driver_name: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: driver_name if device.index == 1 else "other")
    found = hardware_under(torch.device("cuda", 1))
    assert (found and found.name) == name
    assert hardware_under(torch.device("cpu")) is None


def test_a_format_that_a_device_lacks_is_computed_as_fp32() -> None:
    laptop, l4 = (present(hardware_of(RunConfig(hardware=node_of(name)))) for name in ("laptop", "l4"))
    assert laptop.peak_flops("bf16_mixed") == laptop.peak_flops("fp32") == pytest.approx(0.77e12)
    assert l4.peak_flops("fp64") is None


def test_all_problems_of_a_hardware_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "hardware=l4", "hardware.memory_gib=-1", "hardware.operation_us=-2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip().partition(": ")[0] for line in lines[1:]] == [
        "hardware.memory_gib=-1",
        "hardware.operation_us=-2",
    ]
    assert main(["plan", "hardware=l4", "hardware.tflops.fp33=3"]) == 2
    assert "hardware.tflops.fp33: no such number format" in capsys.readouterr().err


def test_this_machine_takes_what_calibrate_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine.here()
    before = ThisMachine(price_usd_h=0.5).here()
    assert before.name == f"{machine.name}, not calibrated"
    values = {
        "version": 1, "date": "2026-11-23", "tflops": {"fp32": 0.1}, "memory_gb_s": 9.0, "operation_us": 4.0,
        "within_host": {"gb_s": 1.5, "latency_us": 40.0}, "input_mb_s": 90.0,
    }  # fmt: skip
    calibration_file(machine).parent.mkdir()
    calibration_file(machine).write_text(json.dumps(Calibration.of(values).document(machine)))
    found = ThisMachine(price_usd_h=0.5).here()
    assert (found.tflops["fp32"], found.memory_gb_s, found.input_mb_s, found.price_usd_h) == (0.1, 9.0, 90.0, 0.5)
    assert found.notes == (f"hardware: {machine.name}, calibrated; trainkit calibrate (2026-11-23)",)


def test_a_damaged_calibration_is_refused_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibration_file(Machine.here())
    path.parent.mkdir()
    path.write_text('{"version": 9}')
    with pytest.raises(ConfigError) as caught:
        ThisMachine().here()
    assert str(caught.value.problems[0]).startswith(f"hardware=this: {path} holds no calibration (its version is 9)")


@pytest.mark.slow
def test_calibrate_writes_what_this_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrating, "_ROUND_S", 1e-4)
    monkeypatch.setattr(calibrating, "_ROUNDS", 1)
    monkeypatch.setattr(calibrating, "measured_link", lambda *, num_gpus: Link(gb_s=1.5, latency_us=40.0 + num_gpus))
    assert main(["calibrate"]) == 0
    path = calibration_file(Machine.here())
    assert path.parent.parent == tmp_path
    assert str(path) in capsys.readouterr().out
    found = ThisMachine().here()
    assert {"fp64", "fp32", "bf16"} <= found.tflops.keys()
    assert found.within_host == Link(gb_s=1.5, latency_us=40.0)
    assert found.date["tflops"] == json.loads(path.read_text())["date"]


@pytest.mark.long
def test_a_link_is_measured_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "_ROUND_S", 1e-4)
    found = calibrating.measured_link(num_gpus=0)
    assert found.gb_s > 0
    assert found.latency_us > 0
