"""No step waits for its device: what a step reads, copies from the host and launches, phase by phase, on each rank.

A read of a device or a copy from the host that makes every step wait is caught here alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch

from tests.contract import stepping
from tests.contract.stepping import Case, calls_of_a_step, train_in_threads
from tests.support.launches_of_a_step import Calls, StepTrace, counting_graphs
from tests.support.pool import Pool
from trainkit.cli import main
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import Batch, PlanContext, StepOutcome
from trainkit.strategies.core.graphs.whole import WholeGraph
from trainkit.strategies.model_transforms import GraphSettings, ModelTransforms
from trainkit.strategies.updates.chief import Mode, Worker, WorkOrder, WorkReport
from trainkit.trainer.loop import TrainingLoop

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "one_device": {},
    "device_map": {},
    "central_storage": {},
    "mirrored": {"replicas": 2, "reduce": "backend"},
    "fsdp": {"replicas": 2},
    "tensor_parallel": {},
    "pipeline": {},
    "local_sgd": {"replicas": 1, "average_every": 2},
}
TOGETHER: Final = ("mirrored", "fsdp", "tensor_parallel", "pipeline")
"""Strategies whose step takes several processes."""
PRECISIONS: Final = ("fp32", "fp64", "bf16", "bf16_mixed", "fp16_mixed")


def case_of(strategy: str, precision: str) -> Case:
    """The third step of a small GPT, with clipping and counted tokens, two shards."""
    return Case(
        strategy=strategy,
        settings=dict(SETTINGS[strategy]),
        precision=precision,
        task="gpt",
        micro_size=4,
        num_steps=3,
        max_norm=0.2,
    )


def ranks_of(case: Case, pool: Pool) -> list[dict[str, Calls]]:
    count = len(case.make_strategy().tasks(PlanContext()))
    if count == 1:
        return [calls_of_a_step(None, case)]
    found: list[dict[str, Calls]] = pool.run(
        "tests.contract.stepping.calls_of_a_step", case, num_ranks=count, timeout_s=120
    )
    return found


CASES: Final = [
    pytest.param(
        strategy,
        precision,
        marks=[pytest.mark.matrix] if strategy in TOGETHER and precision not in ("fp32", "fp16_mixed") else [],
    )
    for strategy in SETTINGS
    for precision in PRECISIONS
]


LAUNCHES: Final[Mapping[str, Mapping[str, int]]] = {
    "one_device": {"forward": 76, "backward": 180, "reduce": 1, "update": 13},
    "device_map": {"forward": 76, "backward": 180, "reduce": 1, "update": 13},
    "central_storage": {"reduce": 44, "update": 13},  # its threads are not counted
    "mirrored": {"forward": 38, "backward": 69, "reduce": 2, "update": 13},
    "fsdp": {"forward": 42, "backward": 84, "reduce": 3, "update": 19},
    "tensor_parallel": {"forward": 38, "backward": 69, "reduce": 2, "update": 19},
    "pipeline": {"forward": 182, "reduce": 7, "update": 19},  # with zeros for what blocks of other stages return
    "local_sgd": {"forward": 76, "backward": 141, "reduce": 1, "update": 14},
}
"""Strategy -> phase -> launches of a step in fp32, at most, on any rank."""
BACKWARD_IN_BF16: Final = 222
"""Launches of two shards on one device, at most: the second one adds its gradients without widening them first."""


@pytest.mark.parametrize(("strategy", "precision"), CASES)
def test_a_step_reads_nothing_copies_nothing_from_the_host_and_launches_no_more(
    strategy: str, precision: str, pool: Pool
) -> None:
    for phases in ranks_of(case_of(strategy, precision), pool):
        reads = {phase: calls.reads for phase, calls in phases.items() if calls.reads}
        # Whether to repeat the step at a smaller scale is for the host to decide.
        assert reads == ({"update": 1} if precision == "fp16_mixed" else {})
        assert [phase for phase, calls in phases.items() if calls.host_copies] == []
        if precision == "fp32":
            most = LAUNCHES[strategy]
            assert {phase: one.launches for phase, one in phases.items() if one.launches > most[phase]} == {}
        if (strategy, precision) == ("one_device", "bf16"):
            assert phases["backward"].launches <= BACKWARD_IN_BF16


def calls_of_a_worker(store: tuple[str, int], case: Case) -> dict[str, Calls]:
    """What the only worker calls for the last step, by phase; the data that the test makes are left out."""
    trace, execute = StepTrace(), Worker._execute

    def traced(worker: Worker, order: WorkOrder) -> WorkReport:
        with trace if order.step == case.num_steps - 1 else nullcontext():
            return execute(worker, order)

    with patch.object(Worker, "_execute", traced), patch.object(stepping, "ignore_phase", trace.listen):
        train_in_threads(store, case)
    del trace.phases["data"]
    return trace.phases


WORKER: Final[Mapping[Mode, Mapping[str, int]]] = {
    "sync": {"forward": 76, "backward": 140, "reduce": 2},
    "async": {"forward": 76, "backward": 143, "reduce": 15},
}
"""Launches of a worker for a step in fp32, at most: servers update the variables, and clip where they sum a step."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_worker_reads_what_it_reports_and_copies_nothing_from_the_host(
    mode: Mode, precision: str, store: tuple[str, int]
) -> None:
    settings = {"workers": 1, "servers": 1, "timeout_s": 60.0, "mode": mode}
    case = replace(case_of("one_device", precision), strategy="parameter_server", settings=settings)
    phases = calls_of_a_worker(store, case)
    reads = {phase: calls.reads for phase, calls in phases.items() if calls.reads}
    # Loss and weight of each of two work orders; in async those of one, the norm, and whether it overflowed.
    assert reads == {"reduce": 4 if mode == "sync" or precision == "fp16_mixed" else 3}
    assert [phase for phase, calls in phases.items() if calls.host_copies] == []
    if precision == "fp32":
        assert {phase: one.launches for phase, one in phases.items() if one.launches > WORKER[mode][phase]} == {}


GRAPHS: Final = 198
"""Operations of a step by graphs in fp32, at most; inductor fuses most of them."""


@pytest.mark.long
@pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp16_mixed"])
def test_graphs_of_a_step_read_and_copy_nothing(precision: str) -> None:
    graphs = ModelTransforms(compile_mode="step", backend="aot_eager")
    phases = calls_of_a_step(None, replace(case_of("one_device", precision), task="tokens", shaping=graphs))
    decides = precision == "fp16_mixed"
    assert {phase: calls.reads for phase, calls in phases.items() if calls.reads} == ({"update": 1} if decides else {})
    assert sum(calls.host_copies for calls in phases.values()) == 0
    if precision == "fp32":
        assert phases["forward"].launches <= GRAPHS


def test_a_read_and_a_copy_are_seen() -> None:
    with StepTrace() as trace:
        total = torch.tensor([1.0, 2.0]).sum()
        total.item()
    (calls,) = trace.phases.values()
    assert (calls.launches, calls.reads, calls.host_copies) == (1, 1, 1)


@pytest.mark.usefixtures("compiled_gradients", "fresh_graphs")
def test_a_read_inside_a_graph_is_seen() -> None:
    trace = StepTrace()
    with counting_graphs(trace):
        graph = WholeGraph(
            lambda one: one.new_full((2,), one.sum().item()),
            GraphSettings(covers="step", backend="aot_eager"),
            torch.device("cpu"),
            is_joint=True,
        )
        with torch._dynamo.config.patch(capture_scalar_outputs=True), trace:
            graph(torch.ones(3))
    assert trace.total.reads == 1


ALONE: Final = ("strategy.replicas=1", "strategy.process_group=always")
ON_ONE_GPU: Final[Mapping[str, tuple[str, ...]]] = {
    "one_device": (),
    "device_map": (),
    "mirrored": ALONE,
    "multi_worker_mirrored": ALONE,
    "fsdp": ALONE,
    "tensor_parallel": ALONE[:1],
    "central_storage": (),
    "local_sgd": (*ALONE[:1], "strategy.average_every=2"),
}
"""Strategies that one device can run: a pipeline takes two, and workers of a parameter server read what they report."""
COMPILED: Final = [(strategy, mode) for strategy in ("one_device", "mirrored") for mode in ("default", "step")]
FIRST: Final = 3
"""Steps that may wait: they find the layout of gradients and buffers, and copy what stays on the device."""


def waits_of_steps(folder: Path, *run: str, checked: str) -> list[int]:
    """Train eight steps of the digits with torch looking for waits; return the number that each try at a step has.

    Other warnings of a step do not count: inductor warns where it compiles.
    """
    train, waits, precision = TrainingLoop.train, list[int](), torch.get_float32_matmul_precision()

    def watched(loop: TrainingLoop) -> None:
        plain = loop.executor.step

        def step(ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
            torch.cuda.set_sync_debug_mode("default" if ticket.step < FIRST else checked)
            try:
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    return plain(ticket, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchronizing" in str(one.message) for one in found))

        with patch.object(loop.executor, "step", step):
            train(loop)

    silent = ("clip.max_norm=0.2", "batch.micro_size=32", "callbacks=[]", "logger=[]", "quiet=true")
    arguments = [*run, *silent, "steps=8", "eval.every_epochs=null", "checkpoint.export=false"]
    try:
        with patch.object(TrainingLoop, "train", watched):
            assert main(["recipe=digits", *arguments, f"hydra.run.dir={folder}"]) == 0
    finally:
        torch.set_float32_matmul_precision(precision)  # tf32 has changed it for the process
    return waits


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", [*PRECISIONS, "tf32"])
@pytest.mark.parametrize("strategy", ON_ONE_GPU)
def test_on_a_gpu_no_step_waits(strategy: str, precision: str, tmp_path: Path) -> None:
    decides = precision == "fp16_mixed"  # whether to repeat a step is for the host to decide
    if decides and strategy == "local_sgd":
        pytest.skip("local_sgd refuses fp16_mixed")
    run = (f"strategy={strategy}", *ON_ONE_GPU[strategy], f"precision={precision}")
    waits = waits_of_steps(tmp_path / "run", *run, checked="warn" if decides else "error")
    assert max(waits[FIRST:]) <= int(decides)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the one above, and those of inductor and triton, whatever they are
@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize(("strategy", "mode"), COMPILED)
def test_on_a_gpu_no_compiled_step_waits(strategy: str, mode: str, precision: str, tmp_path: Path) -> None:
    run = (f"strategy={strategy}", *ON_ONE_GPU[strategy], f"precision={precision}", f"compile.mode={mode}")
    assert max(waits_of_steps(tmp_path / "run", *run, checked="error")[FIRST:]) == 0
