"""The group `hardware`: figures with their sources, this machine, and no effect on a training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainkit.cli import main
from trainkit.config.identity import difference, fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.yaml_files import shipped_conf
from trainkit.errors import ConfigError
from trainkit.run.estimates.hardware import Hardware, hardware_of, hardware_under
from trainkit.run.estimates.this_machine import Calibration, Machine, ThisMachine, calibration_file
from trainkit.sweeps.launching import identity

CHOICES = sorted(path.stem for path in (shipped_conf() / "hardware").glob("*.yaml"))
SHIPPED = [name for name in CHOICES if name not in ("none", "this")]


def node_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((shipped_conf() / "hardware" / f"{name}.yaml").read_text())
    return found


def test_the_choices_are_those_of_the_documentation() -> None:
    expected = ["a100_80gb", "h100_sxm", "h200", "l4", "laptop", "mi300x", "none", "rtx4090", "this"]
    assert expected == CHOICES


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_has_a_source_and_a_date(name: str) -> None:
    node = node_of(name)
    figures = {key for key, value in node.items() if value is not None} - {
        "_target_", "name", "driver_names", "whole_host", "source", "date",
    }  # fmt: skip
    sources, dates = node["source"], node["date"]
    assert isinstance(sources, dict)
    assert isinstance(dates, dict)
    assert figures == sources.keys() == dates.keys()
    found = hardware_of(RunConfig(hardware=node))
    assert found is not None
    assert found.peak_flops("bf16_mixed")


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


def test_no_two_kinds_have_one_name() -> None:
    names = [name for choice in SHIPPED for name in node_of(choice).get("driver_names", ())]
    assert len(names) == len(set(names)) == 8


def test_hardware_changes_neither_the_fingerprint_nor_the_point_of_a_sweep() -> None:
    plain, chosen = RunConfig(), RunConfig(hardware=node_of("l4"))
    assert fingerprint(plain) == fingerprint(chosen)
    assert identity(plain) == identity(chosen)
    assert not any(one.matters for one in difference(plain, chosen))


def test_a_format_that_a_device_lacks_is_computed_as_fp32() -> None:
    laptop = hardware_of(RunConfig(hardware=node_of("laptop")))
    assert laptop is not None
    assert laptop.peak_flops("bf16_mixed") == laptop.peak_flops("fp32") == pytest.approx(0.77e12)
    l4 = hardware_of(RunConfig(hardware=node_of("l4")))
    assert l4 is not None
    assert l4.peak_flops("fp64") is None


def test_all_problems_of_a_hardware_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "hardware=l4", "hardware.memory_gib=-1", "hardware.operation_us=-2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "2 problems in the config",
        "  hardware.memory_gib=-1: must be more than 0. (command line)",
        "  hardware.operation_us=-2: must be at least 0. (command line)",
    ]
    assert main(["plan", "hardware=l4", "hardware.tflops.fp33=3"]) == 2
    expected = "hardware.tflops.fp33: no such number format. Use one of fp64, fp32, tf32, bf16, fp16. (command line)"
    assert expected in capsys.readouterr().err


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
    expected = f"hardware=this: {path} holds no calibration (its version is 9). Measure again: trainkit calibrate"
    assert str(caught.value.problems[0]) == expected


def test_a_source_of_no_figure_is_refused() -> None:
    node = node_of("l4") | {"source": {"speed": "x"}}
    node.pop("_target_")
    with pytest.raises(ConfigError, match=r"source\.speed: names no figure\. Use a key of hardware\."):
        Hardware(**node)
