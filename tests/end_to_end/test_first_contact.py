"""A row that is lost, or said to hold, when the time of a GPU is over is caught here alone: the script on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import comparing, first_contact, holding, save, speed
from benchmarks.gpu.bench import ALONE, Bench
from benchmarks.gpu.workloads import WORKLOADS
from tests.support import quick
from trainkit import api
from trainkit.config.targets.allowed import allow_packages
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan
from trainkit.trained.build import meta_model

ROOT = Path(__file__).parents[2]


ALIKE = {"resnet", "gpt", "gpt_float8"}
"""Parts that run the code of another part, with a workload that others have too."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alike", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_every_part_holds_on_the_cpu_within_the_time_of_the_script(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part for part in first_contact.PARTS if (part in ALIKE) == alike]
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)  # to put it back
    modules = ("trainkit", "benchmarks.gpu.turns", "benchmarks.gpu.save")
    for module in modules:
        quick.command(module=module)  # makes its script
    quick.quicken_launches(modules=modules)
    assert contact(monkeypatch, "--small", "--out", str(tmp_path), *parts) == 0
    page = (tmp_path / "first_contact.md").read_text()
    for part in parts:
        assert json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert f"## {part}\n" in page
    assert alike or (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


def contact(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the script, in this process."""
    monkeypatch.setattr(sys, "argv", ["first_contact.py", *arguments])
    return first_contact.main()


def test_parts_that_do_not_begin_in_time_are_not_tried_and_one_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(_bench: Bench) -> list[Sequence[str]]:
        raise ValueError("no such thing")

    def holds(bench: Bench) -> list[Sequence[str]]:
        monkeypatch.setattr(time, "monotonic", lambda: bench.deadline)
        return [("one", "missed", "0.9 (target >= 1)")]

    monkeypatch.setattr(first_contact, "PARTS", {"broken": breaks, "last": holds, "late": holds})
    monkeypatch.setattr(first_contact, "SMALL_AT_ONCE", 1)
    assert contact(monkeypatch, "--small", "--part-s", "9999", "--out", str(tmp_path)) == 1
    rows = [json.loads((tmp_path / f"{part}.json").read_text())["rows"][0] for part in ("broken", "last", "late")]
    assert [row[1:] for row in rows] == [
        ["FAILED", "ValueError: no such thing"], ["missed", "0.9 (target >= 1)"], ["not tried", "no time was left"],
    ]  # fmt: skip
    assert "FAILED: broken.\n\nmissed: one.\n\nnot tried: late.\n" in (tmp_path / "first_contact.md").read_text()
    assert "FAILED: 1, missed: 1, not tried: 1" in capsys.readouterr().out


def _mode(mode: str) -> str:
    """The mode of a part; captures need a GPU to be planned."""
    return f"compile.mode={'step' if mode == 'captured' else mode}"


SIZED = {
    name: [*make(False).overrides, *make(False).sizes, _mode(speed.GOALS[name].mode)]
    for name, make in WORKLOADS.items()
    if name in speed.GOALS
}
LARGE = [*WORKLOADS["gpt_large"](False).overrides, *WORKLOADS["gpt_large"](False).sizes, "strategy=fsdp", *ALONE]
SIZED_GPT = ["recipe=null", "steps=24", *WORKLOADS["gpt"](False).overrides, *WORKLOADS["gpt"](False).sizes]
PLANNED: dict[str, Sequence[str]] = {
    **{choice[1]: [*comparing.DIGITS, *choice, "precision=bf16_mixed"] for choice in comparing.PAIRS},
    **{f"alone {choice[0]}": [*comparing.DIGITS, *comparing.DRAWING, *choice, "precision=fp64"]
       for choice in comparing.ALONE_CHOICES},
    **{f"map {choice[0]}": [*comparing.DIGITS, *comparing.DRAWING, *choice] for choice in comparing.maps(small=True)},
    **{mode: [*comparing.DIGITS, _mode(mode), "precision=fp16_mixed"] for mode in comparing.MODES},
    **{name: ["recipe=null", "steps=60", *arguments] for name, arguments in SIZED.items()},
    **{axis: [*comparing.TEXT, *comparing.of_mesh(axis)] for axis in comparing.AXES},
    **{name: [*SIZED_GPT, *more] for name, more in holding.MEMORY_CHOICES},
    "gpt_large": ["recipe=null", "steps=40", *LARGE, "compile.mode=default"],
    "gpt_large float8": ["recipe=null", "steps=40", *LARGE, "convert=float8", "convert.emulate=true"],
    "overlap": ["recipe=digits", "strategy=mirrored", *ALONE, "precision=bf16_mixed", "callbacks=[profiler]"],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_what_a_small_run_leaves_out_can_be_planned(name: str, request: pytest.FixtureRequest) -> None:
    arguments = PLANNED[name]
    if "compile.mode=step" in arguments:
        request.getfixturevalue("compiled_gradients")
    if "convert=float8" in arguments and find_spec("torchao") is None:
        pytest.skip("needs torchao")
    graphs = ["compile.backend=aot_eager"] if any(argument.startswith("compile.mode") for argument in arguments) else []
    composition = api.compose([*arguments, *graphs], config_dirs=[ROOT / "benchmarks/conf"], packages=["benchmarks"])
    with allow_packages(["benchmarks"]):
        plan = make_plan(composition.cfg)
        model_notes(plan, meta_model(plan.cfg))


def test_a_save_holds_the_numbers_from_before_the_next_update(tmp_path: Path) -> None:
    figures = list(save.measured(1e-3, torch.device("cpu"), tmp_path))
    assert [list(figure) for figure in figures] == [["late_s"], ["is_whole"]] * 2
    assert figures[1::2] == [{"is_whole": True}] * 2
