"""The bottleneck of trainings that are bound by one thing each: a rank whose wait counts as exchange is caught here.
What is read from a GPU and its driver, with doubles: a clock that waits in each step is caught here alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainkit
from trainkit.callbacks.gpu import consumed_joules
from trainkit.callbacks.profiler import KernelTimes, StepTimes, breakdown, remedy, verdict
from trainkit.config.schema import RunConfig
from trainkit.trainer import metrics_accumulator
from trainkit.trainer.metrics_accumulator import PhaseClock

MINE = "tests.measuring.slow"
KEYS = (
    "recipe=null", "steps=12", "batch.global_size=8", "callbacks=[profiler]", "callbacks.profiler.skip_steps=6",
    "callbacks.profiler.num_steps=4", "eval.every_epochs=null", f"data._target_={MINE}.SlowSamples",
)  # fmt: skip


def profiled(folder: Path, *overrides: str) -> dict[str, object]:
    trainkit.train(trainkit.compose([*KEYS, *overrides], packages=["tests"]), run_dir=folder)
    report: dict[str, object] = json.loads((folder / "profile" / "bottleneck.json").read_text())
    return report


def profiled_in_a_quiet_moment(folder: Path, kind: str, *overrides: str) -> tuple[Path, dict[str, object]]:
    """Profile anew, at most five times, until a verdict is reached: other processes take time that none is bound by."""
    report: dict[str, object] = {}
    for attempt in range(5):
        report = profiled(run := folder / str(attempt), *overrides)
        if report["bottleneck"] == kind:
            break
    return run, report


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("input", ("data.ms=3", "model=mlp", "model.in_features=4"), "loader.num_workers=auto"),
        ("host", ("data.ms=0", f"model._target_={MINE}.Sleepy", "model.ms=20"), "compile.mode=default"),
    ],
)
@pytest.mark.slow
def test_the_bottleneck_is_named_with_its_key_and_the_trace(
    kind: str, settings: tuple[str, ...], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, report = profiled_in_a_quiet_moment(tmp_path, kind, *settings)
    assert report["bottleneck"] == kind
    line = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bottleneck")][-1]
    assert line.startswith(f"bottleneck: {kind}, ")
    assert line.endswith(f" % of a step. What may reduce it: {key}. Trace: {run}/profile/trace.json")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        ("straggler", "rank=1,phase=forward,action=slow"),
        ("exchange", "rank=0,phase=reduce,action=slow;rank=1,phase=reduce,action=slow"),
    ],
)
def test_the_wait_for_one_rank_and_a_slow_exchange_are_two_verdicts(
    kind: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINKIT_FAIL", fails)
    settings = ("data.ms=0", "model=mlp", "model.in_features=4", "strategy=mirrored", "strategy.replicas=2")
    _, report = profiled_in_a_quiet_moment(tmp_path, kind, *settings, "quiet=true")
    assert report["bottleneck"] == kind
    assert kind != "straggler" or report["slowest_rank"] == 1


def test_kernels_of_a_gpu_are_told_apart_by_name_and_ranges_of_the_host_are_no_kernels() -> None:
    products = ["nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "sm90_xmma_fprop_implicit_gemm_bf16", "triton_tem_fused_mm_0"]
    moves = ["triton_poi_fused_convolution_relu_0", "triton_red_fused_convert_element_type_sum_1", "convert_kernel"]
    ranges = ["Torch-Compiled Region: 0/0", "Optimizer.step#Adagrad.step"]
    events = [
        SimpleNamespace(
            key=name,
            device_type=SimpleNamespace(name="CUDA"),
            self_device_time_total=1e6,
            is_user_annotation=name in ranges,
        )
        for name in (*products, *moves, *ranges, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    ]
    assert KernelTimes.of(events, steps=1, on_device=True) == KernelTimes(compute_s=3.0, memory_s=3.0)


def test_operations_of_a_processor_count_by_kind_if_they_are_no_short_ones_of_python() -> None:
    seconds = {"aten::addmm": 2.0, "aten::neg": 1.0, "Optimizer.step#SGD.step": 9.0, "aten::relu": 1e-6}
    events = [
        SimpleNamespace(key=name, device_type=SimpleNamespace(name="CPU"), self_cpu_time_total=took * 1e6, count=1)
        for name, took in seconds.items()
    ]
    assert KernelTimes.of(events, steps=2, on_device=False) == KernelTimes(compute_s=1.0, memory_s=0.5)


def test_the_rank_that_all_wait_for_may_be_another_in_each_step() -> None:
    slow, quick = (1.0, 0.1), (1.0, 0.9)
    first = StepTimes(steps=(1.0, 1.0), inputs=(0.0, 0.0), exchanges=(slow[1], quick[1]))
    second = StepTimes(steps=(1.0, 1.0), inputs=(0.0, 0.0), exchanges=(quick[1], slow[1]))
    result = breakdown([first, second], KernelTimes())
    assert result.bottleneck == "straggler"
    assert result.shares == pytest.approx(
        {"input": 0, "host": 0.1, "compute": 0, "memory": 0, "exchange": 0.1, "straggler": 0.8}
    )


def test_each_verdict_names_a_key_that_is_not_used_yet() -> None:
    plain, gpu = RunConfig(), RunConfig.from_dict({"precision": {"value": "fp32"}, "strategy": {"compression": "none"}})
    used = RunConfig.from_dict({"loader": {"num_workers": 2}, "compile": {"mode": "default"}})

    def on_cpu(kind: str, cfg: RunConfig = plain, *, is_stream: bool = False) -> str:
        return remedy(kind, cfg, device="cpu", is_stream=is_stream)

    assert on_cpu("input") == "loader.num_workers=auto"
    assert on_cpu("input", is_stream=True) == "data: a stream is read by the training process"
    assert [on_cpu("host"), on_cpu("memory")] == ["compile.mode=default"] * 2
    assert on_cpu("host", used) == "batch.micro_size, with a larger value"
    assert [on_cpu("memory", used), on_cpu("compute")] == ["strategy, with more devices"] * 2
    assert remedy("compute", gpu, device="cuda", is_stream=False) == "precision=bf16_mixed"
    assert on_cpu("exchange").startswith("batch.global_size")
    assert remedy("exchange", gpu, device="cuda", is_stream=False) == "strategy.compression"
    times = StepTimes(steps=(2.0,), inputs=(1.5,), exchanges=(0.0,))
    text = verdict(breakdown([times], KernelTimes(compute_s=9.0)), plain, device="cpu", is_stream=False)
    assert text == "bottleneck: input, 75 % of a step. What may reduce it: loader.num_workers=auto"


class Event:
    """An event of a stream whose device is always late: each event is reached 10 ms after the one before."""

    reached_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "the stream of cuda:1"
        Event.reached_ms += 10.0
        self.at_ms = Event.reached_ms

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_parts_on_a_gpu_are_measured_between_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[None]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append(None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = PhaseClock()
    clock.begin(torch.device("cuda", 1))
    for _ in range(2):
        for phase in ("data", "forward", "backward", "forward", "backward", "reduce", "update"):
            clock(phase, 0)
        clock.end_step()
    assert waits == []
    parts = {"input": 0.02, "forward": 0.04, "backward": 0.04, "exchange": 0.02, "update": 0.02}
    assert clock.lap() == pytest.approx(parts)
    assert len(waits) == 1
    assert clock.lap() == dict.fromkeys(parts, 0.0)


def test_events_that_the_device_has_reached_are_added_up_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(metrics_accumulator, "_MOST_EVENTS", 8)
    monkeypatch.setattr(Event, "query", lambda event: event.at_ms < Event.reached_ms, raising=False)
    clock = PhaseClock()
    clock.begin(torch.device("cuda", 1))
    for _ in range(20):
        clock("forward", 0)
        clock("backward", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    parts = clock.lap()
    assert (parts["forward"], parts["backward"]) == pytest.approx((0.2, 0.19))


def test_the_energy_is_that_of_the_devices_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError

    devices, millijoules = [torch.device("cuda", index) for index in (0, 1)], {b"GPU-0": 1500, b"GPU-1": 500}
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert consumed_joules(devices) == 2.0
    nvml.nvmlInit = refuse
    assert consumed_joules(devices) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert consumed_joules(devices) is None
