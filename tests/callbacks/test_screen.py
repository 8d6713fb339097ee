"""A run that opens without its effective values or closes without its result, folder and compile time is caught here
alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo

from tests.callbacks.run_double import run_double
from trainkit.callbacks.every_run import FinalSummary, StartupSummary


def test_a_run_opens_with_its_effective_values_and_closes_with_its_result(
    cwd: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = run_double(Path("outputs/digits/1"), step=20)
    run.summary, run.notes = {"replicas": "2 on cpu"}, ("The model draws random numbers.",)
    StartupSummary().run_start(run)
    FinalSummary().run_end(run, {"status": "finished", "metrics": {"val/loss": 0.25}})
    assert capsys.readouterr().out == (
        "digits  outputs/digits/1\n"
        "  replicas      2 on cpu\n"
        "  continues at  step 20\n"
        "  note: The model draws random numbers.\n"
        "finished\n"
        "  result  val/loss 0.25\n"
        "  folder  outputs/digits/1\n"
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    StartupSummary().run_start(run_double(elsewhere))
    assert capsys.readouterr().out == f"digits  {elsewhere}\n"


def test_the_end_of_a_compiled_run_says_how_long_compiling_took(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(Path("outputs/digits/1"))
    run.cfg = replace(run.cfg, compile=replace(run.cfg.compile, mode="step"))
    summary = FinalSummary()
    summary.run_start(run)
    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2))
    summary.run_end(run, {"status": "finished"})
    assert re.search(r"\n  compiling  took \d.*\n  folder     outputs/digits/1\n$", capsys.readouterr().out)
