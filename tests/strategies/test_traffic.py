"""A plan whose bytes of a step differ from what ranks send is caught here alone: each strategy, by purpose and link."""

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from torch import nn

import trainkit
from benchmarks.loopback import NAME
from tests.launchers.launches import launch_of
from tests.support import quick
from trainkit.config.compose import compose
from trainkit.config.targets.allowed import allow_packages
from trainkit.run.estimates.outlook import Traffic, step_traffic
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.base import CollectiveCall, Numerics, PlanContext, StepCut, Strategy
from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored
from trainkit.strategies.local_sgd import LocalSgd
from trainkit.strategies.one_device import OneDevice
from trainkit.strategies.parameter_server import ParameterServer
from trainkit.strategies.reducers.options import Reducing
from trainkit.strategies.traffic import AT_MOST, traffic_of
from trainkit.trained.build import meta_model

MODEL = nn.Linear(100, 50, bias=False)
SIZE = 100 * 50 * 4
CUT = StepCut(num_shards=4, num_replicas=2)


def transfers_of(strategy: object, context: PlanContext | None = None, cut: StepCut = CUT) -> list[tuple[str, float]]:
    transfers = traffic_of(strategy, MODEL, context or PlanContext(), cut)  # type: ignore[arg-type]
    assert transfers is not None
    return [(transfer.how, transfer.num_bytes) for transfer in transfers]


def test_one_device_sends_nothing() -> None:
    assert transfers_of(OneDevice()) == []


def test_each_reducer_sends_its_own_bytes_over_three_ranks() -> None:
    sizes = {"backend": 4, "ring": 4, "to_one_device": 14 / 3, "hierarchical": 14 / 3}
    for reduce, times in sizes.items():
        ((_, num_bytes),) = transfers_of(Mirrored(replicas=3, reduce=reduce))  # type: ignore[arg-type]
        assert num_bytes == pytest.approx(times * SIZE), reduce


def test_two_bytes_an_element_halve_the_exchange_and_lanes_keep_it() -> None:
    assert transfers_of(Mirrored(replicas=2, compression="bf16")) == [("all-reduce", SIZE)]
    reproducible = PlanContext(numerics=Numerics(reproducible=True))
    assert transfers_of(Mirrored(replicas=2), reproducible) == [("lanes", 2 * SIZE)]


def test_powersgd_sends_whole_gradients_first_and_thin_ones_later() -> None:
    first, later = transfers_of(Mirrored(replicas=2, compression="powersgd", powersgd_after=7))
    assert (first, later) == (("all-reduce", 2 * SIZE), ("PowerSGD of rank 1", 2 * 150 * 4))
    transfers = traffic_of(Mirrored(replicas=2, compression="powersgd", powersgd_after=7), MODEL, PlanContext(), CUT)
    traffic = Traffic(transfers=transfers or (), ranks_a_host=2)
    assert [traffic.at(step).network_bytes() for step in (6, 7)] == [2 * SIZE, 2 * 150 * 4]


SUMS = "weights, norms and buffers"
SHARDED = ["recipe=digits", "model.hidden=[32]", "strategy=fsdp", "batch.global_size=64", "batch.micro_size=4"]
"""Two layers, of 64 * 32 + 32 and of 32 * 10 + 10 parameters, and 16 shards."""
FIRST, LAST = (64 * 32 + 32) * 4, (32 * 10 + 10) * 4


def of_each(traffic: Traffic) -> dict[tuple[str, str], float]:
    return {(entry.what, entry.how): entry.num_bytes for entry in traffic.transfers if entry.what != SUMS}


@pytest.mark.slow
def test_fsdp_gathers_all_but_the_last_block_twice_a_shard_and_gloo_sums_whole_vectors() -> None:
    assert of_each(planned([*SHARDED, "strategy.replicas=2"])) == {
        ("parameters", "all-gather"): 8 * (2 * FIRST + LAST),
        ("gradients", "reduce-scatter"): 8 * 2 * (FIRST + LAST),
    }
    overrides = [*SHARDED, "strategy.replicas=2", "strategy.reshard_after_forward=false", "strategy.sync=last"]
    assert of_each(planned(overrides))["gradients", "reduce-scatter"] == 2 * (FIRST + LAST)


@pytest.mark.slow
def test_hybrid_groups_sum_the_part_of_a_rank_between_them() -> None:
    traffic = planned([*SHARDED, "strategy.replicas=4", "strategy.replicate=2"])
    (summed,) = [entry.flows for entry in traffic.transfers if (entry.what, entry.how) == ("gradients", "all-reduce")]
    # each rank with its twin, once, by an all-reduce of two, with the weight
    assert summed[0, 2] == summed[2, 0] == (FIRST + LAST) / 2 + 4
    assert (0, 3) not in summed


@pytest.mark.slow
def test_lanes_of_parts_send_each_pass_unsummed() -> None:
    traffic = of_each(planned([*SHARDED, "strategy.replicas=2", "numerics.reproducible=true", "optimizer.fused=false"]))
    assert traffic["gradients", "all-to-all"] == 8 * (FIRST + LAST) + 8  # and the weights
    assert traffic["parameters", "all-gather"] >= 8 * (FIRST + LAST)


def test_workers_pull_once_a_step_and_push_each_shard() -> None:
    assert transfers_of(ParameterServer(workers=2, servers=1)) == [("pull", 2 * SIZE), ("push", 4 * SIZE)]
    assert transfers_of(ParameterServer(workers=2, servers=1, mode="async")) == [("pull", SIZE), ("push", SIZE)]


def test_rows_of_sparse_tables_are_not_known_without_a_dry_run() -> None:
    tables = nn.Embedding(10, 4, sparse=True)
    for strategy in (Mirrored(replicas=2), ParameterServer(workers=2)):
        assert traffic_of(strategy, tables, PlanContext(), CUT) is None


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A dry run with these results."""

    indices: Sequence[int] = ()
    """Indices of each lookup of a shard."""
    averaged: int = 0
    """Bytes of an average."""

    def lookups(self, names: Collection[str]) -> dict[str, list[tuple[int, bool]]]:
        return {name: [(numel, False) for numel in self.indices] for name in names}

    def collectives(self) -> dict[int, list[CollectiveCall]]:
        return {0: [CollectiveCall(kind="all-reduce", ranks=(0, 1), num_bytes=self.averaged, shard=None)]}


TABLES = nn.Sequential(nn.Embedding(1000, 25, sparse=True), nn.Linear(25, 4, bias=False))
ROW = 25 * 4


def rows_sent(strategy: Strategy, lookups: Sequence[int]) -> dict[tuple[str, str], float]:
    cut = StepCut(num_shards=4, num_replicas=2, dry_run=DryRun(indices=lookups))
    transfers = traffic_of(strategy, TABLES, PlanContext(), cut)
    assert transfers is not None
    assert {transfer.note for transfer in transfers if transfer.what.startswith("rows")} == {AT_MOST}
    return {(transfer.what, transfer.how): transfer.num_bytes for transfer in transfers}


@pytest.mark.parametrize(("lookups", "rows"), [((30, 10), 80), ((600,), 1000)])
def test_replicas_gather_the_rows_of_their_lookups_and_at_most_all_of_the_table(
    lookups: Sequence[int], rows: int
) -> None:
    assert rows_sent(Mirrored(replicas=2), lookups) == {
        ("gradients", "shared memory"): 2 * 100 * 4,
        ("rows of sparse gradients", "all-gather"): 2 * rows * (4 + ROW),
    }


def test_workers_read_the_rows_of_each_lookup_and_push_those_of_a_work_order() -> None:
    assert rows_sent(ParameterServer(workers=2, servers=1), [30, 10]) == {
        ("variables", "pull"): 2 * 400,
        ("gradients", "push"): 4 * 400,
        ("rows of sparse tables", "pull"): 4 * 40 * (8 + ROW),
        ("rows of sparse gradients", "push"): 4 * 40 * (4 + ROW),
    }


def test_an_average_sends_parameters_and_slots_in_the_last_step_of_its_window() -> None:
    cut = StepCut(num_shards=4, num_replicas=2, dry_run=DryRun(averaged=3 * SIZE))
    transfers = traffic_of(LocalSgd(average_every=8, local_after=3), MODEL, PlanContext(), cut)
    traffic = Traffic(transfers=transfers or (), ranks_a_host=2)
    sizes = {step: traffic.at(step).network_bytes() for step in range(20)}
    averages = {10: 2 * 3 * SIZE, 18: 2 * 3 * SIZE}
    assert {step: size for step, size in sizes.items() if size} == {**dict.fromkeys((0, 1, 2), 2 * SIZE), **averages}
    assert traffic.by_link() == {"within_host": 2 * 3 * SIZE / 8}
    assert traffic.mean_bytes(3, 19, rank=0) == 2 * 2 * 3 * SIZE / 16


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "sums"), [("none", 4), ("full", 5)])
def test_a_cut_block_sums_activations_twice_in_each_direction_and_once_more_where_it_is_recomputed(
    recompute: str, sums: int
) -> None:
    cut = ["strategy=tensor_parallel", "strategy.degree=2", "strategy.replicas=2", "batch.micro_size=2"]
    traffic = planned([*GPT, *cut, f"activation_checkpointing={recompute}"])
    shards, hidden, tokens = 8, 2 * 64 * 64 * 4, 2 * 64 * 4
    in_parts, whole = 2 * 12 * 64 * 64 + 256 * 64, 64 * 64 + 5 * 64  # whole: positions and norms
    assert of_each(traffic) == {
        # two blocks, what the embedding gives, and the gradient of what the output layer takes, which has the loss
        ("activations and their gradients", "all-reduce"): 2 * ((2 * sums + 2) * hidden + 4 * tokens) * shards,
        ("gradients", "all-reduce"): 2 * 2 * ((in_parts // 2 + whole) * 4 + 4),  # and the weight of a step
    }


def test_an_all_reduce_over_two_hosts_crosses_between_them_once_in_each_direction() -> None:
    context = PlanContext(launch=launch_of(4, num_local=2, num_hosts=2))
    transfers = traffic_of(MultiWorkerMirrored(), MODEL, context, CUT)
    traffic = Traffic(transfers=transfers or (), ranks_a_host=2)
    assert traffic.by_link() == {"within_host": 2 * 1.5 * SIZE, "between_hosts": 2 * 1.5 * SIZE}


def test_a_pipeline_sends_what_its_stages_return_and_its_gradient() -> None:
    transfer, *_ = planned([*SMALL, "strategy=pipeline", "batch.micro_size=8"]).transfers
    assert (transfer.how, transfer.flows) == ("point to point", {(0, 1): 64 * 512 * 4, (1, 0): 64 * 512 * 4})


SMALL = ["recipe=null", "model.hidden=[512,512]", "data=synthetic", "data.num_samples=64000", "batch.global_size=64"]
GPT = ["recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling", "model.vocab_size=256",
       "data.vocab_size=256", "model.context=64", "data.context=64", "model.width=64", "model.num_layers=2",
       "batch.global_size=16"]  # fmt: skip
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "conf"
WITH = (f"--config-dir={BENCHMARKS}", "--allow-package=benchmarks")
LOOKUP = ["recipe=null", "model=lookup", "model.vocab_size=60000", "data=bags", "data.vocab_size=60000", "data.power=1",
          "batch.global_size=128", "optimizer=sgd"]  # fmt: skip


def placed(base: list[str], strategy: str, *more: str, **settings: object) -> list[str]:
    return [*base, f"strategy={strategy}", *(f"strategy.{key}={value}" for key, value in settings.items()), *more]


STRETCHES = (
    "{embed:sequence_split,attention_norm:sequence,mlp_norm:sequence,queries_keys_values:colwise_sequence,"
    "expand:colwise_sequence,project:rowwise_sequence,head:sequence_join}"
)
LANES = "numerics.reproducible=true"
CASES = {
    "mirrored": placed(SMALL, "mirrored", replicas=3, reduce="backend"),
    "ring": placed(SMALL, "mirrored", replicas=3, reduce="ring"),
    "hierarchical": placed(SMALL, "mirrored", replicas=3, reduce="hierarchical"),
    "powersgd": placed(SMALL, "mirrored", replicas=2, compression="powersgd", powersgd_after=2, powersgd_rank=8),
    "lanes": placed(SMALL, "mirrored", LANES, replicas=2),
    "fsdp": placed(SMALL, "fsdp", "batch.micro_size=16", replicas=2),
    "pipeline": placed(SMALL, "pipeline", replicas=2),
    "parameter_server": placed(SMALL, "parameter_server", "batch.micro_size=16", workers=3, servers=2),
    "local_sgd": placed(SMALL, "local_sgd", "optimizer=adamw", average_every=5),
    "tensor_parallel": placed(GPT, "tensor_parallel", "batch.micro_size=8", replicas=1, degree=2),
    "sparse": placed(LOOKUP, "mirrored", replicas=3),
}
MORE = {
    "to_one_device": placed(SMALL, "mirrored", replicas=2, reduce="to_one_device"),
    "bf16": placed(SMALL, "mirrored", replicas=2, compression="bf16"),
    "hybrid": placed(SMALL, "fsdp", replicas=4, replicate=2),
    "lanes of parts": placed(SMALL, "fsdp", "optimizer.fused=false", LANES, replicas=4, replicate=2),
    "async": placed(SMALL, "parameter_server", mode="async"),
    "tensor_parallel, replicas": placed(GPT, "tensor_parallel", "activation_checkpointing=full", replicas=2, degree=2),
    **{f"mesh, {reduce}": placed(SMALL, "mesh", replicate=2, shard=2, reduce=reduce) for reduce in get_args(Reducing)},
    "mesh, bf16": placed(SMALL, "mesh", replicate=2, shard=2, compression="bf16"),
    "mesh": placed(GPT, "mesh", shard=2, tensor=2),
    "tensor_parallel, stretches": placed(GPT, "tensor_parallel", replicas=1, degree=2, plan=STRETCHES),
    "tensor_parallel, bf16": placed(GPT, "tensor_parallel", "precision=bf16_mixed", replicas=1, degree=2),
    "sparse, servers": placed(LOOKUP, "parameter_server", workers=2, servers=2),
}


def planned(overrides: list[str]) -> Traffic:
    with allow_packages(["benchmarks"]):
        plan = make_plan(trainkit.compose(overrides, config_dirs=[BENCHMARKS], packages=["benchmarks"]).cfg)
        model = meta_model(plan.cfg)
        traffic = step_traffic(plan.resolved(lambda: model), model)
    assert traffic is not None
    return traffic


OWN_NETWORK = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
STEPS = (10, 40)
"""Steps of a run between which the bytes are counted."""


def wire_bytes(step: Traffic) -> float:
    """Return the bytes of a step that gloo's TCP connections carry, with the headers of messages and packets.

    A message of a ring costs about 1,000 bytes in addition to its content, including acknowledgements: measured
    with torch 2.13, an all-reduce of two ranks over the loopback device.
    """
    network = [transfer for transfer in step.transfers if transfer.by == "network"]
    messages = sum(transfer.messages * len({rank for pair in transfer.flows for rank in pair}) for transfer in network)
    return step.network_bytes() + 1000 * messages


def mean_wire_bytes(traffic: Traffic) -> float:
    first, last = STEPS
    return sum(wire_bytes(traffic.at(step)) for step in range(first, last)) / (last - first)


def loopback_bytes(overrides: list[str], folder: Path) -> float:
    """Return the bytes of a step that a training sends over the loopback device of a network of its own."""
    first, last = STEPS
    quiet = ["quiet=true", "eval.every_epochs=null", "checkpoint.export=false", "callbacks=[loopback]", "logger=[]",
             "log_every_steps=1000", f"steps={last}", f"hydra.run.dir={folder}"]  # fmt: skip
    subprocess.run(quick.command(*WITH, *overrides, *quiet, within=OWN_NETWORK), capture_output=True, check=True)
    counters = [int(line) for line in (folder / NAME).read_text().splitlines()]
    return (counters[last - 1] - counters[first - 1]) / (last - first)


@pytest.mark.long
@pytest.mark.skipif(subprocess.run(["unshare", "-n", "true"], check=False).returncode != 0, reason="needs root")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE)])
def test_a_step_sends_the_bytes_that_are_planned(name: str, tmp_path: Path) -> None:
    traffic = planned({**CASES, **MORE}[name])
    measured = loopback_bytes({**CASES, **MORE}[name], tmp_path / "run")
    assert mean_wire_bytes(traffic) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("num_gpus", "copies"), [(0, 4), (4, 8)])
def test_the_copies_of_an_asynchronous_plan_are_those_of_its_host(num_gpus: int, copies: int) -> None:
    keys = ["recipe=digits", "strategy=central_storage", "strategy.mode=async"]
    plan = make_plan(compose(keys).cfg, num_gpus=num_gpus)
    memory = memory_of(plan, meta_model(plan.cfg))
    assert memory.exchange_bytes == copies * memory.gradient_bytes
