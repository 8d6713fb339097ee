"""What a step costs besides its arithmetic: kernels, calls of functions, waits for the device, copies from the host.

A read or a copy that makes every step wait, a kernel for every buffer or gradient, and many more calls of functions
are caught here alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from torch import nn

import trainkit
from tests.contract import stepping
from tests.contract.stepping import Case, _Rank, calls_of_a_step, train_in_threads
from tests.support import zoo
from tests.support.counting import Calls, Launches, StepTrace, counting_graphs
from tests.support.pool import Pool
from trainkit import api
from trainkit.cli import main
from trainkit.models.resnet import ResNet
from trainkit.numerics.batch import Ticket
from trainkit.run.estimates.outlook import outlook_of
from trainkit.run.planning.plan import make_plan
from trainkit.run.session.account import counted_work
from trainkit.strategies.base import Batch, PlanContext, StepOutcome
from trainkit.strategies.core.graphs.whole import WholeGraph
from trainkit.strategies.core.step import SmallGrads
from trainkit.strategies.model_transforms import GraphSettings, ModelTransforms
from trainkit.strategies.updates.chief import Mode, Worker, WorkOrder, WorkReport
from trainkit.trained.build import meta_model
from trainkit.trainer.events import State
from trainkit.trainer.loop import TrainingLoop


def launches_of(case: Case) -> Launches:
    """What the second step of one device asks for."""
    rank = _Rank(None, case)
    executor = rank.setup(0)
    rank.steps(executor, 1)
    launches = Launches()
    with launches:
        rank.steps(executor, 2)
    return launches


# 201 and 757, 7 of which count targets; with an operation a buffer, and one for each gradient of a later shard, there
# were 535 and 1,750
@pytest.mark.parametrize(("shards", "most"), [(1, 205), (4, 780)])
def test_a_step_asks_for_less_than_half_of_the_launches_that_a_loop_over_buffers_took(shards: int, most: int) -> None:
    launches = launches_of(Case(task="resnet", global_size=8, micro_size=8 // shards, precision="fp32"))
    assert launches.total <= most, launches.by_name.most_common(8)


class SmallImages(zoo.InMemory):
    """Two images a shard, for a ResNet-50 of full width: a step asks for as many launches as with more and larger."""

    def __init__(self, shards: int) -> None:
        self.inputs, self.targets = torch.randn(2 * shards, 3, 32, 32), torch.arange(2 * shards)


# 562 and 4,587; before buffers were joined 1,443 and 9,227, by the same count
@pytest.mark.parametrize(
    ("shards", "before"), [(1, 1443), pytest.param(8, 9227, marks=pytest.mark.long)], ids=["whole", "eighths"]
)
@pytest.mark.slow
def test_a_mixed_step_of_resnet_50_needs_at_most_half_of_its_earlier_launches(shards: int, before: int) -> None:
    model = {"depth": 50, "num_classes": 1000}
    wide = Case(task="resnet", build=ResNet, model=model, samples=lambda: SmallImages(shards), precision="bf16_mixed")
    launches = launches_of(replace(wide, global_size=2 * shards, micro_size=2))
    assert launches.total <= before / 2, launches.by_name.most_common(8)


GPT_2 = (
    "model=gpt", "model.num_layers=12", "model.num_heads=12", "model.width=768", "model.context=1024",
    "model.vocab_size=50304", "data=synthetic_tokens", "data.vocab_size=50304", "data.context=1024",
    "data.num_samples=64", "data.val_samples=1", "objective=language_modelling", "objective.padding=false",
    "batch.global_size=64", "batch.micro_size=16", "clip.max_norm=1.0", "steps=10",
)  # fmt: skip


@pytest.mark.parametrize(("precision", "most"), [("bf16", 2270), ("bf16_mixed", 3660)])
@pytest.mark.slow
def test_a_step_of_gpt_2_of_four_shards_launches_no_more(precision: str, most: int) -> None:
    plan = make_plan(api.compose(["recipe=null", *GPT_2, f"precision={precision}"]).cfg)
    work = outlook_of(plan, meta_model(plan.cfg)).work
    assert work is not None
    counted = counted_work(work, None, plan)
    assert counted.launches is not None
    assert counted.launches <= most
    compiled = make_plan(api.compose(["recipe=null", *GPT_2, f"precision={precision}", "compile.mode=default"]).cfg)
    assert counted_work(work, None, compiled) == replace(counted, launches=None)


def test_a_gradient_that_a_shard_does_not_use_stays_as_it_is() -> None:
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad, idle.grad = torch.ones(2), torch.full((2,), 5.0)
    earlier = SmallGrads([used, idle])
    (3.0 * used).sum().backward()  # type: ignore[no-untyped-call]
    earlier.add_up()
    assert (used.grad.tolist(), idle.grad.tolist()) == ([4.0, 4.0], [5.0, 5.0])


PACKAGE: Final = str(Path(trainkit.__file__).parent)
ENDS: Final = State.advance.__code__
"""Called once a step, after its update."""
MOST: Final = 160
"""155: about 20 count the targets and scale by their number, 12 look for changed settings and hooks of the optimizer,
10 note the versions of the inputs. Before a run did these there were 102.
"""


@contextmanager
def counted(steps: list[int]) -> Iterator[None]:
    """Append to `steps` the calls of trainkit's functions, and their calls into C, of each step inside."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call" and frame.f_code is ENDS:
            steps.append(0)
        elif steps:
            steps[-1] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.slow
def test_an_eager_step_of_a_small_model_makes_few_calls(tmp_path: Path) -> None:
    steps: list[int] = []
    silent = ("callbacks=[]", "logger=[]", "eval.every_epochs=null", "quiet=true")
    with counted(steps):
        assert main(["recipe=digits", "strategy=one_device", "steps=30", f"hydra.run.dir={tmp_path}/run", *silent]) == 0
    assert len(steps) == 30
    assert min(steps[20:-1]) <= MOST  # of a step that neither logs a row, nor asks whether to stop


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
    ranks: list[dict[str, Calls]] = pool.run(
        "tests.contract.stepping.calls_of_a_step", case, num_ranks=count, timeout_s=120
    )
    return ranks


CASES: Final = [
    (strategy, precision)
    for strategy in SETTINGS
    for precision in (("fp32", "fp16_mixed") if strategy in TOGETHER else PRECISIONS)
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
            assert {phase: calls.launches for phase, calls in phases.items() if calls.launches > most[phase]} == {}
        if (strategy, precision) == ("one_device", "bf16"):
            assert phases["backward"].launches <= BACKWARD_IN_BF16


def calls_of_a_worker(pool: Pool, case: Case) -> dict[str, Calls]:
    """What the only worker calls for the last step, by phase; the data that the test makes are left out."""
    trace, execute = StepTrace(), Worker._execute

    def traced(worker: Worker, order: WorkOrder) -> WorkReport:
        with trace if order.step == case.num_steps - 1 else nullcontext():
            return execute(worker, order)

    with patch.object(Worker, "_execute", traced), patch.object(stepping, "ignore_phase", trace.listen):
        train_in_threads(pool, case)
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
    mode: Mode, precision: str, pool: Pool
) -> None:
    settings = {"workers": 1, "servers": 1, "timeout_s": 60.0, "mode": mode}
    case = replace(case_of("one_device", precision), strategy="parameter_server", settings=settings)
    phases = calls_of_a_worker(pool, case)
    reads = {phase: calls.reads for phase, calls in phases.items() if calls.reads}
    # Loss and weight of each of two work orders; in async those of one, the norm, and whether it overflowed.
    assert reads == {"reduce": 4 if mode == "sync" or precision == "fp16_mixed" else 3}
    assert [phase for phase, calls in phases.items() if calls.host_copies] == []
    if precision == "fp32":
        assert {phase: calls.launches for phase, calls in phases.items() if calls.launches > WORKER[mode][phase]} == {}


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
            lambda values: values.new_full((2,), values.sum().item()),
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
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    return plain(ticket, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchronizing" in str(warning.message) for warning in caught))

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
