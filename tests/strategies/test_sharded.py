"""A plan that cuts a layer whose heads or rows do not come out even is caught here alone.

Models that are cut over ranks: what patterns of tensor parallelism name; a block that fsdp gathers twice, too late, or
leaves out of the memory of the plan; what both refuse.

So is a check of replicas that misses one changed bit, or blames the wrong rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as of_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import zoo
from tests.support.pool import Place, Pool
from tests.support.second_device import SecondDevice, send
from trainkit.models.gpt import Gpt
from trainkit.models.resnet import ResNet
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.collectives import GroupCollective, LocalCollective
from trainkit.strategies.core.replica import bits_hash, drifted_parameter
from trainkit.strategies.mesh import sharding as fully
from trainkit.strategies.mesh.sharding import Sharding, blocks_of_model, fully_sharded, without_shared
from trainkit.strategies.mesh.step import unsharded_model_problems
from trainkit.strategies.mesh.strategy import Fsdp, Mesh, TensorParallel
from trainkit.strategies.mesh.tensor_plan import match_plan
from trainkit.strategies.reducers.vector import VectorReducer
from trainkit.strategies.tensors.layouts import FlatBuffer, local_part

SIZES: dict[str, Any] = {"vocab_size": 12, "context": 4, "num_layers": 2, "num_heads": 2, "width": 8}


def gpt(**sizes: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(**{**SIZES, **sizes})


def test_the_plan_of_the_gpt_cuts_every_large_matrix_and_a_vocabulary_that_comes_out_even() -> None:
    fit = match_plan(gpt(), "auto", 2)
    whole = {name for name, _ in gpt().named_parameters()} - fit.dims.keys()
    kept = {name.rpartition(".")[0].rpartition(".")[2] for name in whole}
    assert kept == {"positions", "attention_norm", "mlp_norm", "norm"}
    assert fit.dims["embed.tokens.weight"] == 0
    assert not {name for name in match_plan(gpt(vocab_size=13), "auto", 2).dims if "tokens" in name}


@pytest.mark.parametrize("pattern", ["expand", "mlp.expand", "blocks.*.mlp.expand", "type:Li*r"])
def test_a_pattern_is_a_name_the_end_of_one_a_glob_or_a_class(pattern: str) -> None:
    names = {one.name for one in match_plan(gpt(), {pattern: "colwise_gathered", "tokens": "rowwise"}, 2).chosen}
    assert names >= {"blocks.0.mlp.expand", "blocks.1.mlp.expand"}


def test_the_first_pattern_that_names_a_module_has_it() -> None:
    fit = match_plan(gpt(), {"blocks.1.mlp.expand": "colwise_gathered", "expand": "colwise"}, 2)
    found = {one.name: one.style.name for one in fit.chosen}
    assert found == {"blocks.0.mlp.expand": "colwise", "blocks.1.mlp.expand": "colwise_gathered"}


EXPAND = "blocks.0.mlp.expand"
UNFIT: list[tuple[nn.Module, Any, str, str]] = [
    (zoo.Net(), "auto", "plan=auto", "Net has no plan"),
    (gpt(), {}, "plan={}", "shards nothing"),
    (gpt(), {"expand": "colwize"}, "plan.expand=colwize", "Did you mean colwise?"),
    (gpt(), {"mlp.expnd": "colwise"}, "plan.mlp.expnd=colwise", "no such module. Did you mean mlp.expand?"),
    (gpt(), {"expand": "colwise", EXPAND: "rowwise"}, f"plan.{EXPAND}=rowwise", "is in expand already"),
    (gpt(), {"mlp_norm": "colwise"}, "plan.mlp_norm=colwise", "is for nn.Linear and nn.Embedding"),
    (zoo.Net(width=7), {"0": "colwise", "2": "rowwise"}, "degree=2", "does not divide the 7 rows of 0.weight"),
    (gpt(num_heads=1), {"queries_keys_values": "colwise"}, "degree=2", "does not divide the 1 heads"),
    (gpt(), {"head.output": "colwise_gathered"}, "plan.head.output=colwise_gathered", "are one parameter (tied)"),
    (gpt(), {"expand": "dropout"}, "plan.expand=dropout", "is for nn.Dropout"),
    (nn.Sequential(nn.MultiheadAttention(4, 2)), {"out_proj": "rowwise"}, "plan.out_proj=rowwise",
     "part of an nn.MultiheadAttention"),
    (nn.Sequential(nn.Embedding(4, 2, sparse=True)), {"0": "rowwise"}, "plan.0=rowwise", "need whole rows"),
    (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), {"0": "rowwise_scattered"},
     "plan.0=rowwise_scattered", "0 computes its weight from other parameters, as weight_norm does"),
]  # fmt: skip


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    for model, plan, key, word in UNFIT:
        told = [str(problem) for problem in TensorParallel(degree=2, plan=plan).validate_model(model, PlanContext())]
        assert [one for one in told if one.startswith(f"strategy.{key}: ") and word in one], (key, told)


@pytest.mark.parametrize(("settings", "key", "word"), [
    ({"degree": 0}, "degree=0", "1 or more"),
    ({"plan": {"0": "colwise"}}, "plan={0:colwise}", "no effect with strategy.degree=1"),
    ({"degree": 2, "replicas": 2, "devices": ("cpu", "cpu")}, "devices=['cpu', 'cpu']", "need 4 devices"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], key: str, word: str) -> None:
    (problem,) = TensorParallel(**settings).validate(PlanContext())
    assert str(problem).startswith(f"strategy.{key}: ")
    assert word in str(problem)


def test_an_order_of_summation_cannot_be_kept() -> None:
    (problem,) = TensorParallel(degree=2).validate(PlanContext(numerics=Numerics(reproducible=True)))
    assert str(problem).startswith("numerics.reproducible=true: is not kept where strategy.degree=2 cuts layers")


def test_a_rank_holds_its_part_of_what_is_cut_and_of_all_rows_where_replicas_share_them_out() -> None:
    plain, sharing = TensorParallel(degree=2, replicas=2), Mesh(shard=2, tensor=2)
    whole = sum(param.numel() for param in gpt().parameters())
    context = PlanContext()
    whole_rows, shared_rows = plain.estimate_memory(gpt(), context), sharing.estimate_memory(gpt(), context)
    assert sum(whole_rows.resident.values()) == (whole - 72) // 2 + 72
    assert sum(shared_rows.resident.values()) == ((whole - 72) // 2 + 72) // 2
    assert whole_rows.transient == 0 < shared_rows.transient


def test_the_plan_of_a_run_says_which_layers_are_cut() -> None:
    (layers,) = TensorParallel(degree=2).notes(gpt(dropout=0.1), CPU)
    assert "embed.tokens rowwise, queries_keys_values colwise, project rowwise" in layers
    assert layers.endswith("Each rank has 72 of 1,704 parameters whole.")
    (alone,) = TensorParallel().notes(gpt(), CPU)
    assert "shards no layer" in alone


CPU = PlanContext()


def deep_gpt(*, num_layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=num_layers, num_heads=2, width=8)


def refusals(facts: PlanContext = CPU, model: nn.Module | None = None, **settings: Any) -> list[str]:
    strategy = Fsdp(**settings)
    return [str(problem) for problem in strategy.validate(facts) or strategy.validate_model(model or deep_gpt(), facts)]


class Halving(torch.optim.SGD):
    """A user's own rule, which looks at whole parameters and says so."""

    elementwise = False


REPRODUCIBLE = PlanContext(numerics=Numerics(reproducible=True))
FUSED = replace(REPRODUCIBLE, optimizer_makers={"optimizer._target_": [partial(torch.optim.AdamW, fused=True)]})
REFUSED_BY_FSDP: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"replicas": 4, "replicate": 3}, CPU, "strategy.replicate=3", "must divide the 4 replicas."),
    ({"replicas": 4, "replicate": 4}, CPU, "strategy.replicate=4", "Use at most 2, or strategy=mirrored"),
    ({"wrap": ()}, CPU, "strategy.wrap=[]", "names no class"),
    ({"offload": True}, CPU, "strategy.offload=true", "the replicas are on the CPU"),
    ({"wrap": ("_Bloc",)}, CPU, "strategy.wrap=_Bloc", "Did you mean _Block?"),
    ({"replicas": 16}, REPRODUCIBLE, "strategy.replicas=16", "more replicas than numerics.lanes=8"),
    ({"replicas": 2}, FUSED, "numerics.reproducible=true", "Use optimizer.fused=false, here and on one device"),
    ({}, PlanContext(optimizer=torch.optim.Adafactor), "optimizer._target_=", "Adafactor uses whole parameters"),
    ({}, PlanContext(optimizer=Halving), "optimizer._target_=", "Halving uses whole parameters"),
]


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    for settings, facts, key, word in REFUSED_BY_FSDP:
        (said,) = refusals(facts, **settings)
        assert said.startswith(key)
        assert word in said
    assert refusals(PlanContext(num_gpus=4), offload=True, replicas=4) == []


def test_parameters_that_cannot_be_cut_are_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    model[1].empty = nn.Parameter(torch.empty(0))
    sparse, scale, empty = refusals(model=model)
    assert "0 has sparse gradients" in sparse
    assert "1.scale has no dims" in scale
    assert "1.empty has no elements" in empty
    whole = TensorParallel(degree=1, replicas=2)  # which shards nothing
    assert whole.validate_model(model, CPU) == []


def test_blocks_are_gathered_by_themselves_and_tied_weights_with_the_model() -> None:
    model = deep_gpt()
    assert list(without_shared(model, blocks_of_model(model))) == ["blocks.0", "blocks.1"]
    with torch.device("meta"):
        resnet = ResNet(depth=18)
    assert [*without_shared(resnet, blocks_of_model(resnet))][:4] == ["stem.0", "stem.1", "blocks.0", "blocks.1"]


def test_parameters_in_a_list_are_gathered_with_the_model_that_reads_them() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "list": nn.ParameterList([torch.ones(2)])})
    assert list(blocks_of_model(model)) == ["layer"]


def test_modules_of_torch_jit_are_refused_and_take_no_keys() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Dropout(0.5)))
    BlockKeys(model, seed=0, devices=[])
    assert "1 is a module of torch.jit" in unsharded_model_problems(model)[0].rule


def test_a_rank_holds_rows_and_gathers_a_block_and_the_next_one() -> None:
    model, strategy = deep_gpt(num_layers=3), Fsdp(replicas=4)
    memory = strategy.estimate_memory(model, CPU)
    held = memory.resident
    assert held["embed.tokens.weight"] == 3 * 8
    assert held["blocks.0.mlp.expand.weight"] == 32 * 8 // 4
    block, rest = 12 * 8 * 8 + 2 * 8, 11 * 8 + 4 * 8 + 8
    assert memory.transient == rest + 4 * block
    halves = Fsdp(replicas=4, replicate=2).estimate_memory(model, CPU).resident
    assert halves["blocks.0.mlp.expand.weight"] == 32 * 8 // 2
    assert Fsdp(replicas=1).estimate_memory(model, CPU).transient == 0


class Deep(nn.Module):
    """A layer, eight blocks, and a head; the blocks are called in an order."""

    def __init__(self, order: list[int], events: list[str]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(8))
        self.order, self.events = order, events

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for number in self.order:
            hidden = self.blocks[number](hidden)
            hidden.register_hook(lambda _grad, number=number: self.events.append(f"backward {number}"))
            self.events.append(f"forward {number}")
        outputs: Tensor = self.head(hidden)
        return outputs


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class Alone(VectorReducer):
    """A reducer of one rank, which notes the buckets that it would exchange in backward."""

    overlaps = True

    def __init__(self, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes)
        self.full: list[int] = []

    def on_full(self, number: int) -> None:
        self.full.append(number)

    def sum(self, flat: Tensor) -> None: ...


def test_parts_of_gradients_go_into_the_vector_bucket_by_bucket(eight: None) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), precision=Precision(value="fp32"))
    fully_sharded(model, list(model)[:3], sharding)
    params = list(model.parameters())
    reducer = Alone(8 * 8 * 4)
    reducer.begin(FlatBuffer([param.shape for param in params], torch.float32, torch.device("cpu")), num_shards=2)
    for is_last in (False, True):
        reducer.begin_backward(params, is_last=is_last)
        model(torch.eye(8)).sum().backward()
        assert sorted(reducer.full) == ([0, 1, 2, 3] if is_last else [])
        reducer.end_backward()
    assert all(reducer.has_taken(place) and param.grad is None for place, param in enumerate(params))
    whole = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    whole.load_state_dict({key: local_part(value) for key, value in model.state_dict().items()})
    whole(torch.eye(8)).sum().backward()
    for sum_, param in zip(reducer.finish(), whole.parameters(), strict=True):
        assert sum_ is not None
        assert param.grad is not None
        torch.testing.assert_close(sum_, 2 * param.grad)


def events_of_a_step(order: list[int], monkeypatch: pytest.MonkeyPatch, *, prefetches: bool = False) -> list[str]:
    """What the second step gathers and computes."""
    events: list[str] = []
    model = Deep(order, events)
    gather, in_order = of_torch.foreach_all_gather, fully.gather_in_order  # type: ignore[attr-defined]

    def recorded(params: Any, *args: Any, **options: Any) -> Any:
        events.append("gather " + params[0]._param_fqn.rpartition(".0.")[0].removeprefix("blocks."))
        return gather(params, *args, **options)

    monkeypatch.setattr(fully, "gather_in_order", lambda model, **_: in_order(model, prefetches=prefetches))
    mesh, device = init_device_mesh("cpu", (8,)), torch.device("cpu")
    sharding = Sharding(mesh=mesh, device=device, precision=Precision(value="fp32"))
    fully_sharded(model, model.blocks, sharding)
    monkeypatch.setattr(of_torch, "foreach_all_gather", recorded)
    for _ in range(2):
        events.clear()
        model(torch.ones(2, 8)).sum().backward()
    return events


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("prefetches", [False, True])
def test_each_block_is_gathered_once_a_direction_in_the_order_of_the_calls(
    prefetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [3, 1, 0, 2, 7, 5, 4, 6]
    events = events_of_a_step(order, monkeypatch, prefetches=prefetches)
    gathers = [one for one in events if one.startswith("gather")]
    names = ["gather ", *(f"gather {number}" for number in order)]
    assert gathers == [*names, *names[-2:0:-1]], "the rest and the last block stay gathered"


@pytest.mark.usefixtures("eight")
def test_with_streams_a_gather_begins_while_the_block_before_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_step([*range(8)], monkeypatch, prefetches=True)
    for number in range(1, 8):
        assert events.index(f"gather {number}") < events.index(f"forward {number - 1}")
    backward = events[events.index("backward 7") :]
    assert "gather 6" in events[events.index("forward 7") : events.index("backward 7")], "begun by the head"
    for number in range(6):
        assert backward.index(f"gather {number}") < backward.index(f"backward {number + 1}") + 2


def whole(model: nn.Module, ranks: GroupCollective | LocalCollective) -> Any:
    """What the check reads of a whole replica."""
    owners, device = dict(model.named_parameters()), torch.device("cpu")
    return SimpleNamespace(owners=owners, parts={}, cuts={}, masters_apart=False, data_ranks=ranks, device=device)


def drift(place: Place, wrong: tuple[int, ...], name: str) -> str | None:
    """What the check of a replica says, once some ranks have changed one bit of a parameter."""
    model = zoo.Net()
    if place.rank in wrong:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    collective = GroupCollective(rank=place.rank, num_ranks=place.num_ranks, device=torch.device("cpu"))
    return drifted_parameter(whole(model, collective))


@pytest.mark.parametrize(("wrong", "name", "said"), [
    ((), "0.weight", None), ((1,), "2.bias", "the parameter 2.bias differs on rank 1 from rank 0."),
    ((0,), "0.weight", "the parameter 0.weight differs on rank 0 from rank 1."),
    ((0, 1), "0.bias", "the parameter 0.bias differs on rank 2 from rank 0."),
])  # fmt: skip
def test_one_changed_bit_of_a_replica_is_found_and_named(wrong: Any, name: str, said: str | None, pool: Pool) -> None:
    found = pool.run("tests.strategies.test_sharded.drift", wrong, name, num_ranks=3, group=True)
    assert found == [said] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bits_of_every_dtype_are_hashed_by_their_place(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 0, 0]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    assert int(bits_hash(one)) != int(bits_hash(other))
    assert (one.tolist(), other.tolist()) == ([1, 0, 0], [0, 1, 0])  # the bits of float64 are int64, without a copy


def test_parameters_on_two_devices_are_compared() -> None:
    model = zoo.Net()
    with SecondDevice():
        send(model.get_submodule("2"))
        assert drifted_parameter(whole(model, LocalCollective())) is None
