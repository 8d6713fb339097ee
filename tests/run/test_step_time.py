"""A planned step bound by the wrong one of arithmetic and memory, or a plan that disturbs its run, is caught here."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.present import present
from tests.support.results import result_of
from trainkit import api
from trainkit.cli import main
from trainkit.objectives.base import Loss
from trainkit.objectives.classification import Classification
from trainkit.run.estimates import outlook
from trainkit.run.estimates.hardware import Band, Hardware, Link
from trainkit.run.estimates.outlook import (
    RankWork,
    Traffic,
    Work,
    WorkCounter,
    budget_of,
    step_time,
    update_work,
)
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.session import account
from trainkit.run.session.account import Figures, Mark, between, differences, line_of, peak_bytes, tcp_bytes
from trainkit.strategies.base import Transfer
from trainkit.trained.build import meta_model
from trainkit.verbs.looking.schema import schema_of

GPU = Hardware(
    name="a device", memory_gib=1.0, memory_gb_s=1000.0, tflops={"fp32": 10.0}, operation_us=0.0,
    within_host=Link(gb_s=10.0, latency_us=0.0), between_hosts=Link(gb_s=1.0, latency_us=0.0),
    reached=Band(low=0.5, high=1.0),
)  # fmt: skip
SHARD = Work(operations={(10**12, 10**9): 1})
"""0.1 s of arithmetic and 1 ms of memory at the peaks of that device."""


def ranks(**changes: object) -> RankWork:
    values: dict[str, object] = {"shard": SHARD, "shards": 1, "update": Work(), "flops": 1e12}
    return RankWork(**(values | changes))  # type: ignore[arg-type]


def exchange(num_bytes: float, *, overlaps: bool, ranks_a_host: int = 2) -> Traffic:
    transfer = Transfer(what="gradients", how="x", flows={(0, 1): num_bytes, (1, 0): num_bytes}, overlaps=overlaps)
    return Traffic(transfers=(transfer,), ranks_a_host=ranks_a_host)


@pytest.mark.parametrize(("recomputes", "passes"), [(False, 4), (True, 5)])
def test_operations_are_counted_as_torch_counts_them_with_their_recomputation(recomputes: bool, passes: int) -> None:
    def run(mode: WorkCounter | FlopCounterMode) -> None:
        with FakeTensorMode():
            block, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.empty(4, 8)
            with mode:
                outputs = checkpoint(block, inputs, use_reentrant=False) if recomputes else block(inputs)
                outputs.sum().backward()

    counter, reference = WorkCounter(), FlopCounterMode(display=False)
    run(counter)
    run(reference)
    product = 2 * 4 * 8 * 8
    assert counter.work().flops == reference.get_total_flops() == (passes + 1) * product


def test_a_view_is_no_work_and_an_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    with WorkCounter() as counter:
        torch.empty(8).view(2, 4).t().detach()
    assert counter.work().num_operations == 0
    assert Work(operations={(10**12, 10**9): 1, (10**6, 10**11): 2}).bound_s(GPU, "fp32") == pytest.approx((0.1, 0.2))
    update = update_work(100, width=4, slots=2)
    assert update.num_bytes == 100 * 4 * (1 + 2 + 2 * 2), "gradients are read, parameters and slots moved"


def test_the_band_is_what_the_reached_shares_allow() -> None:
    time = step_time(ranks(), None, GPU, "fp32")
    assert (time.band.low, time.band.high) == pytest.approx((0.1, 0.2))
    assert time.shares() == pytest.approx({"compute": 1.0, "memory": 0.0, "host": 0.0, "exchange": 0.0, "input": 0.0})
    assert time.mfu == pytest.approx(0.1 / time.step_s)


def test_an_exchange_that_overlaps_is_hidden_at_the_lower_bound_alone_and_takes_its_own_link() -> None:
    hidden = step_time(ranks(), exchange(4e8, overlaps=True), GPU, "fp32")
    shown = step_time(ranks(), exchange(4e8, overlaps=False), GPU, "fp32")
    assert (hidden.band.low, hidden.band.high) == pytest.approx((0.1, 0.2 + 0.04 * 1.15))
    assert (shown.band.low, shown.band.high) == pytest.approx((0.1 + 0.04 * 0.9, 0.2 + 0.04 * 1.15))
    between = step_time(ranks(), exchange(1e8, overlaps=False, ranks_a_host=1), GPU, "fp32")
    assert between.band.low == pytest.approx(0.1 + 0.1 * 0.9), "a byte between hosts takes the link between hosts"


def test_tasks_of_a_host_share_a_processor_and_pay_for_one() -> None:
    shared = Hardware(**{**vars(GPU), "whole_host": True, "price_usd_h": 3.6})
    time = step_time(ranks(tasks_a_host=2, num_devices=2), None, shared, "fp32")
    assert time.band.low == pytest.approx(0.2)
    assert present(budget_of(time, num_steps=1000, num_devices=1, hardware=shared).cost_usd).low == pytest.approx(0.2)


def test_samples_are_waited_for_unless_other_processes_read_them() -> None:
    slow = Hardware(**{**vars(GPU), "input_mb_s": 1.0})
    alone = step_time(ranks(input_bytes=50_000), None, slow, "fp32")
    beside = step_time(ranks(input_bytes=50_000, loaders=1), None, slow, "fp32")
    assert (alone.band.low, beside.band.low) == pytest.approx((0.15, 0.1))


def test_plan_prints_time_and_cost_with_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "recipe=digits", "strategy=mirrored", "hardware=laptop", "hardware.price_usd_h=7200"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    time, cost = document["time"], document["cost"]
    assert time["low_s"] <= time["step_s"] <= time["high_s"]
    assert sum(time["shares"].values()) == pytest.approx(1.0)
    assert cost["total"] == pytest.approx(time["step_s"] * document["steps"] * 2, rel=1e-6)
    assert document["traffic"]["links"] == {"memory": 2 * 9610 * 4}
    assert main(["plan", "recipe=digits", "--json"]) == 0  # without hardware
    document = json.loads(capsys.readouterr().out)
    assert document["work"]["flops"] > 2e6
    assert (document["time"]["step_s"], document["cost"]["total"], document["traffic"]["links"]) == (None, None, {})


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    assert main(["recipe=digits", "callbacks=[]", "logger=[]", f"hydra.run.dir={folder}", *overrides]) == 0
    return result_of(folder)


@pytest.mark.slow
def test_after_20_steps_the_plan_and_the_measured_step_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "peak_bytes", lambda *_, **__: 10**6)
    result = trained(tmp_path / "run", "steps=24", "hardware=laptop")
    plan, measured = result["plan"], result["measured"]
    assert plan["low_s"] <= plan["step_s"] <= plan["high_s"]
    assert (measured["steps"], measured["at_end"]["steps"]) == (20, 24)
    assert measured["per_cent"]["step_s"] == pytest.approx(100 * (measured["step_s"] / plan["step_s"] - 1), abs=0.1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: after 20 steps ")]
    assert len(lines) == 1
    written = json.loads((tmp_path / "run/plan.json").read_text())
    assert (written["memory"]["step"], written["time"]["step_s"]) == (plan["memory"], plan["step_s"])
    errors = [comparison["per_cent"]["memory"] for comparison in (measured, measured["at_end"])]
    planned = [written["memory"]["step"], written["memory"]["evaluation"]]  # it evaluates after 23 steps
    assert errors == [round(100 * (10**6 / size - 1), 1) for size in planned]
    rehearsed = trained(tmp_path / "rehearsed", "steps=21", "hardware=h100_sxm", "quiet=true")
    assert rehearsed["measured"]["per_cent"]["step_s"] is None, "a processor is not held against the plan of a GPU"


@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_a_run_that_has_lost_a_rank_is_held_against_the_plan_of_those_that_run(strategy: str) -> None:
    def planned(replicas: int) -> RunPlan:
        ranks = (f"strategy={strategy}", f"strategy.replicas={replicas}")
        return make_plan(api.compose(["recipe=digits", *ranks, "batch.micro_size=8"]).cfg)

    three, two = planned(3), planned(2)
    model = meta_model(two.cfg)
    left, expected = outlook.outlook_of(account.of_ranks(three, 2), model), outlook.outlook_of(two, model)
    assert (left.document(), left.memory.document()) == (expected.document(), expected.memory.document())
    assert left.document() != outlook.outlook_of(three, model).document()
    assert account.of_ranks(three, 3) is three


def test_an_error_of_the_plan_is_recorded_and_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(outlook, "outlook_of", fails)
    result = trained(tmp_path / "run", "steps=21", "quiet=true")
    assert (result["status"], result["plan"], result["plan_error"]) == ("finished", None, "ValueError: no such thing")


class Remembering(Classification):
    """Adds the loss of the step before, which it remembers."""

    before: ClassVar[Tensor | float] = 0.0

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        loss = super().score(outputs, targets)
        before, self.__dict__["before"] = self.before, loss.loss_sum.detach()
        return replace(loss, loss_sum=loss.loss_sum + 0.1 * before)


@pytest.mark.slow
def test_the_plan_of_a_training_changes_no_state_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("objective._target_=tests.run.test_step_time.Remembering", "--allow-package", "tests", "quiet=true")
    watched = trained(tmp_path / "held", "steps=24", *overrides)
    assert "plan_error" not in watched
    monkeypatch.setattr(account, "_LAST", 100)
    assert watched["metrics"] == trained(tmp_path / "not_held", "steps=24", *overrides)["metrics"]


class Stubborn(nn.Linear):
    """Reads its numbers in its constructor."""

    built: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.scale = float(self.weight.sum())
        type(self).built += 1

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


@pytest.mark.slow
def test_a_model_with_data_is_not_built_a_second_time_beside_the_trained_one(tmp_path: Path) -> None:
    keys = ("recipe=null", "data=digits", "model._target_=tests.run.test_step_time.Stubborn", "--allow-package=tests")
    results = {}
    for steps in (19, 21):
        Stubborn.built = 0
        folder = tmp_path / str(steps)
        arguments = [*keys, "callbacks=[]", "logger=[]", "quiet=true", f"steps={steps}", f"hydra.run.dir={folder}"]
        assert main(arguments) == 0
        results[steps] = Stubborn.built, result_of(folder)
    assert results[19][0] == results[21][0]
    assert results[21][1]["plan_error"] == "TrainingError: the model cannot be built without data"
    assert not {"plan", "measured", "plan_error"} & results[19][1].keys(), "a shorter run plans nothing"


def test_bytes_of_connections_are_counted_while_they_are_open() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client:
        other, _ = listener.accept()
        with other, client.dup(), other.dup():
            before = present(tcp_bytes())
            client.sendall(b"x" * 10_000)
            assert len(other.recv(10_000, socket.MSG_WAITALL)) == 10_000
            assert 20_000 <= present(tcp_bytes()) - before < 30_000  # both ends, each once however many descriptors


def test_on_the_processor_a_small_plan_is_not_compared() -> None:
    cpu = torch.device("cpu")
    assert peak_bytes(cpu, before=0, planned=10**6) is None
    assert (peak_bytes(cpu, before=0, planned=10**9) or 0) > 0


def test_an_unknown_figure_has_no_difference_and_a_known_one_stands_with_what_was_planned() -> None:
    assert between(Mark(step=5, seconds=1.0, tcp_bytes=None), Mark(step=5, seconds=2.0, tcp_bytes=3)) == (None, None)
    assert between(Mark(step=5, seconds=1.0, tcp_bytes=None), Mark(step=6, seconds=2.0, tcp_bytes=3)) == (1.0, None)
    assert differences(Figures(), Figures(step_s=1.0)) == dict.fromkeys(("memory", "step_s", "bytes_a_step"))
    assert line_of(Figures(step_s=1.0), Figures(memory=1), 20) is None
    line = line_of(Figures(memory=2**30, step_s=0.01), Figures(memory=2**30, step_s=0.02), 20)
    assert present(line).endswith("(planned 1 GiB, 0 %); 20 ms a step (planned 10 ms, +100 %)")


def test_the_layers_of_an_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--model", "--json", "recipe=null", "model=mlp", "batch.global_size=32"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("model")).validate(document)
    layers = [(row["name"], row["kind"], row["output"], row["parameters"], row["flops"]) for row in document["layers"]]
    assert layers == [
        ("layers.0", "Linear", [32, 128], 64 * 128 + 128, 2 * 32 * 64 * 128),
        ("layers.1", "ReLU", [32, 128], 0, 0),
        ("layers.2", "Linear", [32, 10], 128 * 10 + 10, 2 * 32 * 128 * 10),
    ]
    assert (document["batch"], document["parameters"], document["trained"]) == (32, 9610, 9610)
    assert document["flops"] == sum(layer["flops"] for layer in document["layers"])
    assert main(["ls", "--model", "recipe=null", "model=mlp"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "9,610 parameters, 1.21 M FLOPs in a forward pass of 64 samples"
