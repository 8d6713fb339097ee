"""The work of a step, its time as a band, and the cost of a training."""

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainkit.cli import main
from trainkit.run.estimates.hardware import Band, Hardware, Link
from trainkit.run.estimates.step_time import Measured, RankWork, budget_of, step_time
from trainkit.run.estimates.traffic import Traffic
from trainkit.run.estimates.work import Work, WorkCounter, update_work
from trainkit.strategies.traffic import Transfer

GPU = Hardware(
    name="a device",
    memory_gib=1.0,
    memory_gb_s=1000.0,
    tflops={"fp32": 10.0},
    within_host=Link(gb_s=10.0, latency_us=0.0),
    between_hosts=Link(gb_s=1.0, latency_us=0.0),
    reached=Band(low=0.5, high=1.0),
    operation_us=0.0,
)
SHARD = Work(operations={(10**12, 10**9): 1})
"""0.1 s of arithmetic and 1 ms of memory at the peaks of that device."""


def ranks(**changes: object) -> RankWork:
    values: dict[str, object] = {"shard": SHARD, "shards": 1, "update": Work(), "flops": 1e12}
    return RankWork(**(values | changes))  # type: ignore[arg-type]


def exchange(num_bytes: float, *, overlaps: bool, ranks_a_host: int = 2) -> Traffic:
    one = Transfer(what="gradients", how="x", flows={(0, 1): num_bytes, (1, 0): num_bytes}, overlaps=overlaps)
    return Traffic(transfers=(one,), ranks_a_host=ranks_a_host)


@pytest.mark.parametrize(("recomputes", "passes"), [(False, 4), (True, 5)])
def test_operations_are_counted_as_torch_counts_them_with_their_recomputation(recomputes: bool, passes: int) -> None:
    def run(mode: WorkCounter | FlopCounterMode) -> None:
        with FakeTensorMode():
            block, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.empty(4, 8)
            with mode:
                outputs = checkpoint(block, inputs, use_reentrant=False) if recomputes else block(inputs)
                outputs.sum().backward()

    ours, theirs = WorkCounter(), FlopCounterMode(display=False)
    run(ours)
    run(theirs)
    one = 2 * 4 * 8 * 8
    assert ours.work().flops == theirs.get_total_flops() == (passes + 1) * one


def test_a_view_and_an_allocation_are_no_work() -> None:
    with WorkCounter() as counter:
        torch.empty(8).view(2, 4).t().detach()
    assert counter.work().num_operations == 0


def test_an_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    work = Work(operations={(10**12, 10**9): 1, (10**6, 10**11): 2})
    assert work.bound_s(GPU, "fp32") == pytest.approx((0.1, 0.2))


def test_the_update_reads_gradients_and_moves_parameters_and_slots() -> None:
    assert update_work(100, width=4, slots=2).num_bytes == 100 * 4 * (1 + 2 + 2 * 2)


def test_the_band_is_what_the_reached_shares_allow() -> None:
    time = step_time(ranks(), None, GPU, "fp32")
    assert (time.band.low, time.band.high) == pytest.approx((0.1, 0.2))
    assert time.shares() == pytest.approx({"compute": 1.0, "memory": 0.0, "host": 0.0, "exchange": 0.0, "input": 0.0})
    assert time.mfu == pytest.approx(0.1 / time.step_s)


def test_an_exchange_that_overlaps_is_hidden_at_the_lower_bound_alone() -> None:
    hidden = step_time(ranks(), exchange(4e8, overlaps=True), GPU, "fp32")
    shown = step_time(ranks(), exchange(4e8, overlaps=False), GPU, "fp32")
    assert (hidden.band.low, hidden.band.high) == pytest.approx((0.1, 0.2 + 0.04 * 1.15))
    assert (shown.band.low, shown.band.high) == pytest.approx((0.1 + 0.04 * 0.9, 0.2 + 0.04 * 1.15))


def test_a_byte_between_hosts_takes_the_link_between_hosts() -> None:
    time = step_time(ranks(), exchange(1e8, overlaps=False, ranks_a_host=1), GPU, "fp32")
    assert time.band.low == pytest.approx(0.1 + 0.1 * 0.9)


def test_tasks_of_a_host_share_a_processor_and_pay_for_one() -> None:
    shared = Hardware(**{**vars(GPU), "whole_host": True, "price_usd_h": 3.6})
    time = step_time(ranks(tasks_a_host=2, num_devices=2), None, shared, "fp32")
    assert time.band.low == pytest.approx(0.2)
    budget = budget_of(time, num_steps=1000, num_devices=1, hardware=shared)
    assert budget.cost_usd is not None
    assert budget.cost_usd.low == pytest.approx(0.2)


def test_a_measured_replica_replaces_the_counted_operations() -> None:
    found = Measured(shard_s=0.01, update_s=0.002, spread=0.1)
    time = step_time(ranks(shards=4), exchange(1e8, overlaps=False), GPU, "fp32", measured=found)
    assert (time.band.low, time.band.high) == pytest.approx((0.042 / 1.1 + 0.01 * 0.9, 0.042 * 1.1 + 0.01 * 1.15))


def test_samples_are_waited_for_unless_other_processes_read_them() -> None:
    slow = Hardware(**{**vars(GPU), "input_mb_s": 1.0})
    alone = step_time(ranks(input_bytes=50_000), None, slow, "fp32")
    beside = step_time(ranks(input_bytes=50_000, loaders=1), None, slow, "fp32")
    assert (alone.band.low, beside.band.low) == pytest.approx((0.15, 0.1))


def test_plan_prints_time_and_cost_with_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "recipe=digits", "strategy=mirrored", "hardware=laptop", "hardware.price_usd_h=7200"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    time, cost = found["time"], found["cost"]
    assert time["low_s"] <= time["step_s"] <= time["high_s"]
    assert sum(time["shares"].values()) == pytest.approx(1.0)
    assert cost["total"] == pytest.approx(time["step_s"] * found["steps"] * 2, rel=1e-6)
    assert found["traffic"]["links"] == {"memory": 2 * 9610 * 4}
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for label in (
        "sent a step",
        "work a step",
        "checkpoint",
        "time a step",
        "MFU",
        "time to the end",
        "cost to the end",
    ):
        assert f"  {label} " in shown


def test_without_hardware_a_plan_has_work_and_traffic_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=digits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["work"]["flops"] > 2e6
    assert (found["time"]["step_s"], found["cost"]["total"], found["traffic"]["links"]) == (None, None, {})
