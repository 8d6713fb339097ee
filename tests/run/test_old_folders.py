"""Run folders and a sweep folder that were written before modules moved go on after it, in the same bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainkit.cli import main
from trainkit.moved import with_current_targets

OLD = Path(__file__).resolve().parents[1] / "data" / "old_folders"
ENDED_WITH = {
    "mirrored": {
        "GenuineIntel": "5378834cf3c9b08a2f3b478e716f2f07ed98977710ced4b2bba03adabf543568",
        "AuthenticAMD": "5378834cf3c9b08a2f3b478e716f2f07ed98977710ced4b2bba03adabf543568",
    },
    "fsdp": {
        "GenuineIntel": "60c070d61809e61080f4cb2978f342a9318ebf6d9cca12cd542d5b5032dae79c",
        "AuthenticAMD": "c93f365de3b67917e4bbe49c2dd5291954ab849f10f0549087b9ee4fe4b12b43",
    },
    "parameter_server": {
        "GenuineIntel": "a36dd47e011b5baa3e6ed2e08d5748fbb3711feeec60a526733e0798fc8f9dad",
        "AuthenticAMD": "d07ac6a8aec6a60512f00534cf87ca1e54db76875e8977eae7374fd20c76f678",
    },
}
"""SHA-256 of the weights with which the old code ended these runs, on `MACHINE`, by the vendor of the processor, which
decides about the kernels of MKL.
"""
MACHINE = ("2.13.0+cpu", "AVX512")
SWEEP = ("model.hidden=[8]", "steps=8", "warmup.epochs=0", "checkpoint.every_steps=4", "eval.every_epochs=null",
    "callbacks={}", "logger={}", "quiet=true", "seed=1,2,3", "sweep.slots=1")  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def vendor() -> str:
    found = re.search(r"^vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else ""


def resumed(folder: Path) -> dict[str, Any]:
    assert main(["resume", str(folder), "stop_at_step=null"]) == 0
    return result(folder)


@pytest.mark.parametrize(
    "name", [name if name == "mirrored" else pytest.param(name, marks=pytest.mark.long) for name in ENDED_WITH]
)
@pytest.mark.slow
def test_an_old_run_goes_on_in_the_same_bits(name: str, tmp_path: Path) -> None:
    old, renamed = shutil.copytree(OLD / name, tmp_path / "old"), shutil.copytree(OLD / name, tmp_path / "renamed")
    config = renamed / "resolved.yaml"
    values = yaml.safe_load(config.read_text())
    assert with_current_targets(values) != values
    config.write_text(yaml.safe_dump(with_current_targets(values)))
    before, after, other = result(old), resumed(old), resumed(renamed)
    assert (after["status"], after["steps"]) == ("finished", 8)
    assert after["fingerprint"] == before["fingerprint"] == other["fingerprint"]
    assert after["weights_sha256"] == other["weights_sha256"] != before["weights_sha256"]
    if (torch.__version__, torch.backends.cpu.get_cpu_capability()) == MACHINE:
        assert after["weights_sha256"] == ENDED_WITH[name].get(vendor(), after["weights_sha256"])


@pytest.mark.slow
def test_an_old_sweep_goes_on_and_runs_no_finished_job_again(tmp_path: Path) -> None:
    sweep = shutil.copytree(OLD / "sweep", tmp_path / "sweep")
    before = (sweep / "0" / "result.json").read_bytes()
    assert main(["-m", *SWEEP, f"sweep.resume={sweep}"]) == 0
    assert (sweep / "0" / "result.json").read_bytes() == before
    assert [result(sweep / job)["status"] for job in "012"] == ["finished"] * 3
