"""A map on the command line: read as it stands, judged with the model, shown by the plan."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cli import main

GPT = ("recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling", "strategy=device_map")


def test_a_bad_map_is_refused_with_the_argument_that_set_it(refuse: Callable[..., list[str]]) -> None:
    assert refuse("recipe=null", "strategy=device_map", "strategy.map={layers.0:cpu,layer.2:cpu}") == [
        "strategy.map.layer.2=cpu: no such module. Did you mean layers.2? (command line)"
    ]


def test_values_of_another_kind_are_refused(refuse: Callable[..., list[str]]) -> None:
    assert refuse("recipe=null", "strategy=device_map", "strategy.map=atuo") == [
        "strategy.map=atuo: must be a mapping or auto. Did you mean auto? (command line)"
    ]


def test_prove_judges_the_map_before_it_trains(refuse: Callable[..., list[str]]) -> None:
    assert refuse("prove", "recipe=null", "strategy=device_map", "strategy.map={layers.0:cpu}") == [
        (
            "strategy.map: no device for layers.2.weight, layers.2.bias. Add layers.2: DEVICE, or rest: DEVICE. "
            "(command line)"
        )
    ]


def test_the_plan_counts_the_memory_of_the_fullest_device_and_says_so(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--world", "2", *GPT, "strategy.map={embed:0,blocks.0-1:0,blocks.2-3:1,head:0}"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory")]
    assert row.startswith("  memory a device  6.63 MiB and activations: parameters 1.66 MiB,")


def test_the_plan_shows_what_is_where(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world", "2", *GPT, "strategy.map={embed:0,blocks.0-1:0,blocks.2-3:1,head:0}"]) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "",
        "  stage  modules            parameters     bytes  device",
        "      0  embed, blocks.0-1     434,688  3.32 MiB  cuda:0",
        "      1  blocks.2-3            393,728     3 MiB  cuda:1",
        "      2  head                      128     1 KiB  cuda:0",
    ]
    assert list(cwd.iterdir()) == []


def test_a_key_of_another_library_is_refused_with_the_name_of_the_key_of_trainkit(
    refuse: Callable[..., list[str]],
) -> None:
    assert refuse("recipe=null", "device_map=auto") == [
        (
            "device_map: no such key. Did you mean strategy.map? It is a key of strategy=device_map (one replica over "
            "several devices) and of strategy=mirrored (several replicas). (command line)"
        )
    ]


@pytest.mark.usefixtures("compiled_gradients")
def test_a_step_over_several_devices_is_no_graph(refuse: Callable[..., list[str]]) -> None:
    groups = ("strategy=mirrored", "strategy.devices=[[cpu,cpu],[cpu,cpu]]", "strategy.map=auto")
    assert refuse("plan", "recipe=null", *groups, "compile.mode=step") == [
        (
            "compile.mode=step: Mirrored, as its keys are set, does not run steps as graphs. Use "
            "compile.mode=default, or "
            "use strategy=mirrored. (command line)"
        )
    ]
