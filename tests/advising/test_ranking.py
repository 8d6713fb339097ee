"""How ways are ranked, with figures made here: a way that does not fit and is ranked, or a saver in vain, is caught."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from trainkit.advising.advice import Figures, Goal, TriedWay, Way, advise, try_family, try_way
from trainkit.errors import ConfigError, Problem

SAVERS = (("activation_checkpointing=full",), ("activation_checkpointing=full", "batch.micro_size=4"))


def way(name: str, devices: int = 1) -> Way:
    return Way(strategy=name, devices=devices, precision="", overrides=(f"strategy={name}",))


def figures(*, needs: int = 10, step_s: float | None = 1.0, devices: int = 1, fits: bool | None = None) -> Figures:
    return Figures(needs=needs, has=16, fits=needs <= 16 if fits is None else fits, step_s=step_s, devices=devices)


def tried(name: str, devices: int, step_s: float, needs: int = 10) -> TriedWay:
    plan = figures(needs=needs, step_s=step_s, devices=devices)
    return TriedWay(way=way(name, devices), overrides=(f"strategy={name}",), figures=plan)


ONE, ALL, SHARDED = tried("one_device", 1, 8.0), tried("mirrored", 8, 1.2), tried("fsdp", 8, 1.3, needs=4)


@pytest.mark.parametrize(("goal", "names"), [
    ("time", ["mirrored", "fsdp", "one_device"]),
    ("cost", ["one_device", "mirrored", "fsdp"]),
    ("memory", ["fsdp", "one_device", "mirrored"]),
])  # fmt: skip
def test_near_figures_count_as_equal_and_the_simplest_way_is_first(goal: Goal, names: Sequence[str]) -> None:
    assert [attempt.way.strategy for attempt in advise([SHARDED, ALL, ONE], goal).ranking] == names


def test_each_way_has_a_reason() -> None:
    refused = TriedWay(way=way("pipeline", 8), overrides=(), refused="strategy.stages=8: is more than the 4 blocks.")
    unknown = TriedWay(
        way=way("mirrored", 2), overrides=(), figures=Figures(needs=1, has=2, fits=None, step_s=None, devices=2)
    )
    advice = advise([ONE, ALL, SHARDED, tried("one_device", 1, 1.0, needs=2**30), refused, unknown], "time")
    assert [advice.reason(attempt) for attempt in (*advice.ranking, *advice.others)] == [
        "the shortest step",
        "as fast within 10%, and a more complex strategy",
        "6.7 times the time",
        "does not fit: needs 1 GiB, has 16 B",
        "refused: strategy.stages=8: is more than the 4 blocks.",
        "not known: its activations, and therefore its memory and time",
    ]


def test_a_way_that_does_not_fit_takes_the_first_saver_that_is_enough() -> None:
    needs: Mapping[tuple[str, ...], int] = {("strategy=fsdp",): 40, ("strategy=fsdp", *SAVERS[0]): 15}
    result = try_way(way("fsdp", 8), lambda keys: figures(needs=needs[tuple(keys)]), savers=SAVERS, goal="time")
    assert result.overrides == ("strategy=fsdp", "activation_checkpointing=full")
    assert result.is_legal


def test_memory_is_saved_for_the_goal_memory_alone_where_a_way_fits() -> None:
    def planned(overrides: Sequence[str]) -> Figures:
        return figures(needs=16 - len(overrides))

    assert try_way(way("fsdp"), planned, savers=SAVERS, goal="time").overrides == ("strategy=fsdp",)
    assert try_way(way("fsdp"), planned, savers=SAVERS, goal="memory").overrides == ("strategy=fsdp", *SAVERS[0])


def test_a_saver_that_is_refused_is_passed_over_and_a_refused_way_keeps_its_problem() -> None:
    def planned(overrides: Sequence[str]) -> Figures:
        if len(overrides) == 2:
            raise ConfigError([Problem(key="activation_checkpointing", rule="no.")])
        return figures(needs=40 if len(overrides) == 1 else 12)

    assert try_way(way("fsdp"), planned, savers=SAVERS, goal="time").overrides == ("strategy=fsdp", *SAVERS[1])

    def refused(_: Sequence[str]) -> Figures:
        raise ConfigError([Problem(key="strategy", value="fsdp", rule="cannot."), Problem(key="x", rule="y.")])

    assert try_way(way("fsdp"), refused, savers=SAVERS, goal="time").refused == "strategy=fsdp: cannot."


@pytest.mark.parametrize(("goal", "step_s", "most", "counts"), [
    ("time", {8: 1.0, 4: 1.05, 2: 2.0}, 10, [8, 4, 2]),
    ("time", {8: 1.0, 4: 1.9, 2: 3.0}, 10, [8, 4]),
    ("time", {8: 1.0, 4: 1.0, 2: 1.0}, 3, [8, 4]),
    ("cost", {8: 1.0, 4: 1.0, 2: 1.0}, 10, [2]),
    ("cost", {8: 1.0, 4: 1.0, 2: 1.0}, 3, [2, 4, 8]),
    ("memory", {8: 1.0, 4: 1.0, 2: 1.0}, 10, [8]),
])  # fmt: skip
def test_numbers_of_devices_are_tried_while_they_may_be_better(
    goal: Goal, step_s: Mapping[int, float], most: int, counts: Sequence[int]
) -> None:
    def attempt(way: Way) -> TriedWay:
        needs = 96 // way.devices if most == 3 else 10
        plan = figures(needs=needs, step_s=step_s[way.devices], devices=way.devices)
        return TriedWay(way=way, overrides=(), figures=plan)

    attempts = try_family([way("fsdp", count) for count in (2, 4, 8)], attempt, goal)
    assert [trial.way.devices for trial in attempts] == counts
