"""Variables cut over servers whose update differs in a bit from one optimizer's are caught here alone.

What servers hold, send, add up and step is what one optimizer would have; what travels is no more than needed: a whole
table, frozen weights or full floats that travel once too often are caught here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from tests.support.present import present
from tests.support.serving import Farm, links_to, serving, state_of, stepping
from trainkit.errors import CheckpointError, TrainingError
from trainkit.numerics.batch import lane_order
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.core.optimizer import OptimizerStepper, optimizer_state
from trainkit.strategies.reducers.vector import DeterministicReducer
from trainkit.strategies.tensors.layouts import FlatBuffer
from trainkit.strategies.updates.server import ParameterServerClient, ServerShard, SumOptions, VariableServer, lane_sum
from trainkit.strategies.updates.variables import (
    Variable,
    VariableShards,
    split_problems,
    tensors_of,
    variables_of,
)

COUNTS = [1, 4]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


class Net(nn.Module):
    """Sizes that no server count divides: a large matrix, small ones, a frozen one, statistics."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = nn.Linear(37, 101)
        self.norm = nn.BatchNorm1d(101)
        self.fixed = nn.Linear(101, 3).requires_grad_(False)
        self.head = nn.Linear(101, 7)
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def optimizer_of(name: str) -> Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer]:
    return lambda named: OPTIMIZERS[name](list(named.values()))


def gradients(model: nn.Module, seed: int, *, missing: tuple[int, ...] = ()) -> list[Tensor | None]:
    torch.manual_seed(seed)
    params = [param for param in model.parameters() if param.requires_grad]
    return [None if place in missing else torch.randn_like(param) for place, param in enumerate(params)]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("servers", COUNTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_on_servers_are_those_of_one_optimizer_bit_for_bit(optimizer: str, servers: int) -> None:
    model, worked = Net(), Net()
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    stepper = OptimizerStepper(optimizer_of(optimizer)(named), list(named.values()))
    with serving(worked, optimizer_of(optimizer), servers=servers) as farm:
        worker = farm.client()
        for step in range(5):
            missing = (1,) if step == 2 else ()
            stepper.step(gradients(model, step, missing=missing), 1.0 + step)
            worker.push("w0/0", gradients(model, step, missing=missing))
            farm.chief.apply(version=step + 1, lr_factor=1.0 + step, keys=["w0/0"])
            assert worker.pull(tensors_of(worked)) == step + 1
        found = farm.chief.state()
        worker.close()
    equal(state_of(worked), state_of(model))
    equal(found, {**state_of(model), **optimizer_state(stepper.optimizer, named)})


def updated(farm: Farm, model: nn.Module, version: int) -> dict[str, Tensor]:
    """The state after one more update."""
    farm.chief.push("a", gradients(model, version))
    farm.chief.apply(version=version, lr_factor=1.0, keys=["a"])
    return farm.chief.state()


def test_a_state_that_one_server_gave_goes_on_on_three() -> None:
    model = Net()
    with serving(model, optimizer_of("adamw")) as farm:
        early, late = updated(farm, model, 1), updated(farm, model, 2)
    with serving(model, optimizer_of("adamw"), servers=3, loads=False) as farm:
        farm.chief.load_state(early, version=1, unsaved={"buffer/table": model.table})
        equal(updated(farm, model, 2), late)
    assert late["optimizer/step/head.bias"] == 2


@pytest.mark.parametrize("servers", COUNTS)
def test_sums_over_lanes_have_the_bits_of_the_lane_reducer(servers: int) -> None:
    model, shards = Net(), 12  # some of the 8 lanes have two
    pushed = [gradients(model, seed, missing=(2,) if seed == 3 else ()) for seed in range(shards)]
    packing = FlatBuffer([param.shape for _, param in trained(model)], torch.float32, CPU)
    of_lane = {lane: [clones(one) for one in pushed[lane::8]] for lane in lane_order(8) if lane < shards}
    reducer = DeterministicReducer(lanes=8, rank=0, num_ranks=1)
    reducer.begin(packing, num_shards=shards)
    for lane, held in of_lane.items():
        reducer.add(lane, lane_sum(held, None, packing) if len(held) > 1 else held[0])
    expected = [present(total) for total in reducer.finish()]
    norms = torch.stack(torch._foreach_norm(expected, 2.0))
    with serving(model, optimizer_of("sgd"), servers=servers) as farm:
        for shard, grads in enumerate(pushed):
            farm.chief.push(f"s/{shard}", grads)
        options = SumOptions(check_finite=True, lanes=8, norms=True)
        found = farm.chief.sum([f"s/{shard}" for shard in range(shards)], options, exact=True)
        assert found.finite
        assert torch.equal(found.norm, torch.linalg.vector_norm(norms))
        farm.chief.apply(version=1, lr_factor=1.0)
        state = farm.chief.state()
    for (name, param), total in zip(trained(model), expected, strict=True):
        assert torch.equal(state[f"param/{name}"], param.detach().clone().add_(total, alpha=-0.1))


CPU = torch.device("cpu")


def clones(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if one is None else one.clone() for one in tensors]


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def test_what_is_discarded_changes_nothing() -> None:
    model = Net()
    grads = gradients(model, 1)
    present(grads[-1])[0] = float("nan")
    with serving(model, optimizer_of("momentum"), servers=2) as farm:
        farm.chief.push("a", grads)
        assert not farm.chief.sum(["a"], SumOptions(check_finite=True)).finite
        farm.chief.apply(version=1, lr_factor=1.0, keys=[])
        assert farm.chief.pull(tensors_of(model)) == 1
        farm.chief.push("b", gradients(model, 1))
        farm.chief.discard_staged(["b", "never there"])
        with pytest.raises(TrainingError, match="ps:0 refuses: there is no gradient b"):
            farm.chief.apply(version=2, lr_factor=1.0, keys=["b"])
        equal(farm.chief.state(), state_of(model))


def test_servers_between_two_updates_are_read_again() -> None:
    model, worked = Net(), Net()
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        worker = farm.client()

        def apply(server: int) -> None:
            asked = {"version": 1, "lr_factor": 1.0, "factor": 1.0, "buffer_factor": 1.0, "keys": ["a"]}
            farm.chief.ask(server, {}, VariableServer.apply, **asked)  # type: ignore[arg-type]

        worker.pull(tensors_of(worked))
        farm.chief.push("a", gradients(model, 1))
        apply(1)
        before, pulled = worker.links[0].received_bytes, Thread(target=worker.pull, args=(tensors_of(worked),))
        pulled.start()
        while worker.links[0].received_bytes == before:  # it has read the one that is behind
            time.sleep(0.001)
        apply(0)
        pulled.join()
        assert (worker.version, worker.mixed) == (1, False)
        state = farm.chief.state()
        worker.close()
    assert all(torch.equal(state[f"param/{name}"], param) for name, param in worked.named_parameters())


def test_only_the_chief_gives_orders() -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        worker = farm.client("worker:3")
        with pytest.raises(ConnectionError, match=r"ps:0 (closed the connection|is gone)"):
            worker.apply(version=1, lr_factor=1.0, keys=[])
        worker.close()
        assert farm.chief.pull(tensors_of(Net())) == 0


def test_a_client_or_a_checkpoint_of_another_model_is_refused() -> None:
    model = Net()
    with serving(model, optimizer_of("sgd")) as farm:
        other = VariableShards(variables_of(nn.Linear(2, 2), torch.float32), 1)
        with pytest.raises(TrainingError, match="ps:0 refuses: worker:1 has another model, or another number of serv"):
            ParameterServerClient(links_to(farm.addresses, "worker:1"), other)
        tensors = state_of(model)
        del tensors["param/head.bias"]
        with pytest.raises(CheckpointError, match=r"param/head.bias is missing there"):
            farm.chief.load_state(tensors, version=0)


@pytest.mark.parametrize("servers", [2, 7])
def test_servers_hold_equal_bytes_and_cut_at_most_one_variable_a_boundary(servers: int) -> None:
    sizes = [(50_000, 64), (64,), (256, 64), (256,), (64, 256), (64,), (1,), ()]
    variables = [Variable(name=f"v{i}", kind="param", shape=s, dtype=torch.float32) for i, s in enumerate(sizes)]
    shares = VariableShards(variables, servers)
    fair = sum(variable.num_bytes for variable in variables) / servers
    assert [server for server in range(servers) if abs(shares.bytes_of(server) / fair - 1) > 0.1] == []
    assert len(shares.split) <= servers - 1
    pieces = [piece for of_server in shares.pieces for piece in of_server]
    rows = [(piece.place, row) for piece in pieces for row in range(piece.start, piece.stop)]
    assert rows == [(place, row) for place, one in enumerate(variables) for row in range(one.num_rows)]


def test_a_cut_that_an_optimizer_feels_is_refused() -> None:
    shares = VariableShards(variables_of(nn.Linear(64, 64, bias=False), torch.float32), 2)
    [problem] = split_problems(shares, PlanContext(optimizer=torch.optim.Adafactor))
    assert "Adafactor uses whole parameters, and 2 servers would have parts of weight" in str(problem)
    assert split_problems(VariableShards(shares.variables, 1), PlanContext(optimizer=torch.optim.Adafactor)) == []
    assert split_problems(shares, PlanContext(optimizer=torch.optim.AdamW)) == []
    shares = VariableShards([Variable(name="odd", kind="param", shape=(30, 100_001), dtype=torch.float32)], 2)
    assert shares.bytes_of(0) == shares.bytes_of(1)
    [problem] = split_problems(shares, PlanContext(numerics=Numerics(reproducible=True)))
    assert str(problem).startswith("numerics.reproducible=true: 2 servers would cut odd within 16 numbers")


def test_what_is_being_sent_stays_as_it_is_while_an_update_goes_on_in_other_memory() -> None:
    model = Net()
    pieces = VariableShards(variables_of(model, torch.float32), 1).pieces[0]
    held = ServerShard(pieces, torch.float32, stepping(optimizer_of("momentum")))
    held.load({**state_of(model), "buffer/table": model.table}, version=3)
    memory, lent = held.begin_read(range(4, len(pieces)), torch.float32)
    before = memory.clone()
    for version in (4, 5):
        held.update([*gradients(model, version), *[None] * 6], version=version, lr_factor=1.0)
    assert torch.equal(memory, before)
    assert torch.equal(lent["0"], before[: lent["0"].numel()])
    held.end_read(memory)
    late, _ = held.begin_read((), torch.float32)
    assert (late.data_ptr() != memory.data_ptr(), held.version) == (True, 5)
    assert torch.equal(late, torch.cat([master.detach().flatten() for master in held.masters.values()]))
    assert not torch.equal(late, before)


def moved(worker: ParameterServerClient, act: Callable[[], object]) -> dict[int, int]:
    """Bytes to and from each server while something is done."""
    before = [link.sent_bytes + link.received_bytes for link in worker.links]
    act()
    return {server: link.sent_bytes + link.received_bytes - before[server] for server, link in enumerate(worker.links)}


def a_step(farm: Farm, worker: ParameterServerClient, model: nn.Module, grads: list[Tensor | None]) -> dict[int, int]:
    """Bytes of a push and a pull of everything."""
    pushed = moved(worker, lambda: worker.push("a", grads))
    farm.chief.apply(version=worker.version + 1, lr_factor=1.0, keys=["a"])
    pulled = moved(worker, lambda: worker.pull(tensors_of(model)))
    return {server: pushed[server] + count for server, count in pulled.items()}


def test_what_is_not_trained_travels_once() -> None:
    fixed = nn.Linear(100, 100).requires_grad_(False)
    model = nn.Sequential(fixed, nn.Linear(100, 2))
    with serving(model, optimizer_of("sgd")) as farm:
        worker = farm.client()
        first = moved(worker, lambda: worker.pull(tensors_of(model)))[0]
        second = moved(worker, lambda: worker.pull(tensors_of(model)))[0]
        with torch.no_grad():
            fixed.bias.fill_(3.0)
        farm.chief.load_state(state_of(model), version=7)
        other = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 2))
        assert worker.pull(tensors_of(other)) == 7
        worker.close()
    assert 4 * 100 * 101 <= first - second < 4 * 100 * 101 + 100  # their names travel as well
    equal(state_of(other), state_of(model))


def test_bf16_halves_the_bytes_and_rounds_what_travels_once() -> None:
    model, worked = Net(), Net()
    grads = gradients(model, 1)
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        whole, half = farm.client("worker:0"), farm.client("worker:1", transfer=torch.bfloat16)
        for worker in (whole, half):
            worker.pull(tensors_of(worked))
        full = a_step(farm, whole, worked, grads)
        farm.chief.load_state(state_of(model), version=0, unsaved={"buffer/table": model.table})
        half.pull(tensors_of(worked))
        short = a_step(farm, half, worked, grads)
        state = farm.chief.state()
        whole.close()
        half.close()
    buffers = 4 * (2 * 101 + 5) + 8
    assert abs((sum(short.values()) - buffers) / (sum(full.values()) - buffers) - 0.5) < 0.02
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    pulled = dict(worked.named_parameters())
    for (name, param), grad in zip(params, grads, strict=True):
        expected = param.detach().clone().add_(present(grad).bfloat16().float(), alpha=-0.1)
        assert torch.equal(state[f"param/{name}"], expected)
        assert torch.equal(pulled[name], state[f"param/{name}"].bfloat16().float())


class Table(nn.Module):
    """A table and a head."""

    def __init__(self, rows: int = 1000, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(rows, width, sparse=True)
        self.head = nn.Linear(width, 3)


def sparse_gradients(model: Table, rows: list[int], seed: int) -> list[Tensor]:
    """A row that occurs twice, and none of the second server's."""
    torch.manual_seed(seed)
    values = torch.randn(len(rows), model.embed.weight.shape[1])
    table = torch.sparse_coo_tensor(torch.tensor([rows]), values, model.embed.weight.shape, check_invariants=False)
    return [table, torch.randn_like(model.head.weight), torch.randn_like(model.head.bias)]


@pytest.mark.parametrize(("optimizer", "servers"), [("sgd", 1), ("adagrad", 3)])
def test_rows_and_values_make_the_update_of_one_optimizer_and_to_rounding_that_of_the_dense_gradient(
    optimizer: str, servers: int
) -> None:
    model, dense = Table(), Table()
    steppers = {
        one: OptimizerStepper(optimizer_of(optimizer)(dict(one.named_parameters())), list(one.parameters()))
        for one in (model, dense)
    }
    with serving(model, optimizer_of(optimizer), servers=servers) as farm:
        for step, rows in enumerate([[3, 3, 700], [5], [999, 0, 3]]):
            table, *others = sparse_gradients(model, rows, step)
            steppers[model].step([table.coalesce(), *others], 1.0)
            steppers[dense].step([grad.to_dense() for grad in sparse_gradients(model, rows, step)], 1.0)
            farm.chief.push("a", sparse_gradients(model, rows, step))
            farm.chief.apply(version=step + 1, lr_factor=1.0, keys=["a"])
        found = farm.chief.state()
        pulled = farm.chief.pull_rows(0, torch.tensor([700, 3, 3, 999]))
    equal(found, {**state_of(model), **optimizer_state(steppers[model].optimizer, dict(model.named_parameters()))})
    torch.testing.assert_close(model.embed.weight, dense.embed.weight, rtol=1e-6, atol=0)
    assert torch.equal(pulled, model.embed.weight[[700, 3, 3, 999]])
