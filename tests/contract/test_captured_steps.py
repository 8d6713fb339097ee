"""Steps replayed as CUDA graphs compute what direct calls do: on a CPU with a double of the device.

A replayed graph that reads the batch or the learning rate of the step that was captured is caught here alone.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from tests.contract.stepping import Case, train
from tests.support.pool import Pool
from trainkit.strategies.core.graphs.captured import CapturingCaller, CudaCapture
from trainkit.strategies.core.graphs.whole import DirectCall, WholeGraph
from trainkit.strategies.model_transforms import GraphSettings, ModelTransforms

pytestmark = pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")


class Repeats:
    """A recording that runs the function again on the same tensors, and fills the same outputs; recording runs nothing
    that lasts.
    """

    def __init__(self, state: Sequence[Tensor]) -> None:
        self._state = state
        self._run: Callable[[], Sequence[Tensor]]
        self._outputs: Sequence[Tensor]

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Keep the function."""
        before = [one.clone() for one in self._state]
        self._run, self._outputs = run, run()
        for one, kept in zip(self._state, before, strict=True):
            one.copy_(kept)
        return self._outputs

    def replay(self) -> None:
        """Run it."""
        for output, found in zip(self._outputs, self._run(), strict=True):
            output.copy_(found)


class Summing:
    """Adds batches to a total, by a graph that is captured with doubles."""

    def __init__(self, make: Callable[[Sequence[Tensor]], Repeats] = Repeats) -> None:
        self.total = torch.zeros(2)
        self.captures = 0
        self._pool = WeakSet[Repeats]()
        self._make = make
        settings = GraphSettings(covers="step", backend="eager")
        caller = CapturingCaller(self._capture)
        self.graph = WholeGraph(self._added, settings, torch.device("cpu"), is_joint=True, call=caller)

    def _capture(self) -> Repeats:
        gc.collect()  # a double refers to its call, a CUDA graph does not
        if self.captures and not self._pool:
            raise RuntimeError("use_count > 0")  # of CUDA: a pool that has lost its last graph is not used again
        self.captures += 1
        made = self._make([self.total])
        self._pool.add(made)
        return made

    def _added(self, batch: Tensor) -> tuple[Tensor, int]:
        self.total.add_(batch.sum())
        return batch * 2, 7

    def add(self, batch: Tensor, *, unchanged: bool = True) -> tuple[list[float], int]:
        """Add a batch; what the graph returned."""
        doubled, seven = self.graph(batch, unchanged=unchanged)
        return doubled.tolist(), seven


@pytest.mark.slow
def test_replays_take_new_batches_and_change_the_state_once_a_step() -> None:
    summing = Summing()
    for step in range(1, 9):
        assert summing.add(torch.full((2,), float(step))) == ([2.0 * step] * 2, 7)
        assert summing.total.tolist() == [step * (step + 1.0)] * 2
    assert summing.captures == 1


@pytest.mark.slow
def test_a_result_outlives_the_next_replay() -> None:
    summing = Summing()
    for _ in range(6):
        summing.add(torch.ones(2))
    first, _ = summing.graph(torch.ones(2), unchanged=True)
    summing.add(torch.zeros(2))
    assert first.tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_checked_step_needs_no_other_capture_and_moved_tensors_do() -> None:
    summing = Summing()
    for step in range(12):
        summing.add(torch.ones(2), unchanged=step % 6 != 5)
    assert (summing.captures, summing.total.tolist()) == (1, [24.0, 24.0])
    summing.total.set_(torch.zeros(2))  # type: ignore[call-overload] # moved without a change of the object
    for step in range(6):
        summing.add(torch.ones(2), unchanged=step > 0)
    assert (summing.captures, summing.total.tolist()) == (2, [12.0, 12.0])


@pytest.mark.slow
def test_batches_of_another_shape_are_called_directly() -> None:
    summing = Summing()
    for step in range(1, 13):
        size = 1 if step % 6 == 0 else 2
        assert summing.add(torch.ones(size)) == ([2.0] * size, 7)
    assert (summing.captures, summing.total.tolist()) == (1, [22.0, 22.0])


class Refused(Repeats):
    """A recording that the device refuses."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Refuse."""
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.slow
def test_a_step_that_cannot_be_captured_is_called_directly_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    summing = Summing(Refused)
    with caplog.at_level(logging.WARNING, "trainkit"):
        for _ in range(10):
            summing.add(torch.ones(2))
    (record,) = (one for one in caplog.records if one.name.startswith("trainkit"))
    assert record.getMessage().startswith("compile.cuda_graphs: a step cannot be captured")
    assert record.getMessage().endswith("operation not permitted when stream is capturing")
    assert (summing.captures, summing.total.tolist()) == (1, [20.0, 20.0])


def test_a_step_that_also_reads_another_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    batch, other = torch.ones(2), torch.zeros((), device="meta")
    call = DirectCall(graph=lambda one, _: [one], inputs=[None, other], places=[(0, 0)], layout=None, results=[])
    caller = CapturingCaller(partial(Repeats, []))
    for _ in range(5):
        caller(call, [batch])
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["it uses tensors on cpu and meta"]


class FailingGraph:
    """`torch.cuda.graph` of a capture that fails: it raises before it leaves its stream."""

    def __init__(self, streams: list[str]) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._streams.append("capture")

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class Stream:
    """`torch.cuda.stream`: the last of the streams is the current one."""

    def __init__(self, streams: list[str], name: str) -> None:
        self._streams, self._name, self._before = streams, name, list(streams)

    def __enter__(self) -> None:
        self._streams.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._streams[:] = self._before


def test_after_a_capture_that_fails_stream_and_allocator_are_those_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, left = ["training"], list[tuple[str, int, tuple[int, int]]]()
    for call in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{call}", lambda *args, call=call: left.append((call, *args)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_args, **_kwargs: FailingGraph(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", partial(Stream, streams))
    with pytest.raises(RuntimeError, match="during capture"):
        CudaCapture((0, 3)).record(list)  # type: ignore[arg-type] # a pool
    assert streams == ["training"]
    assert left == [("endAllocateToPool", 1, (0, 3)), ("releasePool", 1, (0, 3))]


CAPTURED = ModelTransforms(compile_mode="step", cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of inductor and triton, about tensor cores, processors, old syntax
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("micro_size", [8, 3])
def test_on_a_gpu_captured_steps_give_the_bits_of_direct_ones(
    precision: Any, micro_size: int, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        settings={"device": "cuda:0"},
        optimizer="adamw",
        micro_size=micro_size,
        precision=precision,
        max_norm=0.5,
        num_steps=30,
        shaping=CAPTURED,
    )
    replays, plain = list[int](), CudaCapture.replay

    def counted(capture: CudaCapture) -> None:
        replays.append(1)
        plain(capture)

    monkeypatch.setattr(CudaCapture, "replay", counted)
    (captured,) = train(pool, case)
    assert replays
    (direct,) = train(pool, replace(case, shaping=replace(CAPTURED, cuda_graphs=False)))
    assert all(torch.equal(one, direct.state[name]) for name, one in captured.state.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
def test_on_a_gpu_moved_tensors_are_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda", 0)
    caller = CapturingCaller(partial(CudaCapture, torch.cuda.graph_pool_handle()))

    def add(batch: Tensor) -> tuple[Tensor]:
        return (total.add_(batch @ batch).sum(),)

    graph = WholeGraph(add, GraphSettings(covers="step", backend="eager"), device, is_joint=True, call=caller)
    total, ones = torch.zeros(2, 2, device=device), torch.ones(2, 2, device=device)
    for _ in range(2):
        total.set_(torch.zeros(2, 2, device=device))  # type: ignore[call-overload]
        sums = [graph(ones, unchanged=step > 0)[0].item() for step in range(8)]
        assert sums == [8.0 * step for step in range(1, 9)]
    assert caplog.records == []


@pytest.mark.gpu
def test_on_a_gpu_a_capture_that_fails_leaves_no_trace() -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        CudaCapture(torch.cuda.graph_pool_handle()).record(
            lambda: [torch.ones(int(torch.ones(1, device="cuda").item()))]
        )
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()  # an error while torch takes a capture to be under way
    assert torch.ones(2, device="cuda").sum().item() == 2.0
