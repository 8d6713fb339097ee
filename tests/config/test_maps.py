"""A map that leaves a module without a device, or a plan that counts its memory twice, is caught here alone."""

from pathlib import Path

import pytest

from tests.config.conftest import Refuse
from trainkit.cli import main

MAP = ("strategy=device_map", "strategy.map={embed:0,blocks.0-1:0,blocks.2-3:1,head:0}")


@pytest.mark.slow
def test_the_plan_shows_what_is_where_and_the_memory_of_the_fullest_device(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = ("recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling")
    assert main(["plan", "--world", "2", *gpt, *MAP]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("  memory")]
    assert row.startswith("  memory a device  6.63 MiB and activations: parameters 1.66 MiB,")
    assert lines[-4:] == [
        "  stage  modules            parameters     bytes  device",
        "      0  embed, blocks.0-1     434,688  3.32 MiB  cuda:0",
        "      1  blocks.2-3            393,728     3 MiB  cuda:1",
        "      2  head                      128     1 KiB  cuda:0",
    ]
    assert list(cwd.iterdir()) == []


@pytest.mark.usefixtures("compiled_gradients")
def test_a_step_over_several_devices_is_no_graph(refuse: Refuse) -> None:
    groups = ("strategy=mirrored", "strategy.devices=[[cpu,cpu],[cpu,cpu]]", "strategy.map=auto")
    (problem,) = refuse("plan", "recipe=null", *groups, "compile.mode=step")
    assert problem.startswith("compile.mode=step: Mirrored, as its keys are set, does not run steps as graphs.")
