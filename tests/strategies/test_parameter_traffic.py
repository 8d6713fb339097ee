"""A whole table, frozen weights or full floats that travel once too often are caught here alone.

What workers and servers send: shares of equal size, half of it in bf16, rows of a table alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.test_parameter_store import Net, equal, gradients, optimizer_of
from tests.support.present import present
from tests.support.serving import Farm, serving, state_of
from trainkit.strategies.core.optimizer import OptimizerStepper, optimizer_state
from trainkit.strategies.parameter_server.server.aggregation import AggregationOptions
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variable_shards import tensors_of

HEADS = 512
"""Bytes of a request's and an answer's head and text, at most."""


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


@pytest.mark.parametrize("servers", [1, 4])
def test_each_server_carries_its_share_of_the_traffic(servers: int) -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 90))
    size = sum(4 * param.numel() for param in model.parameters())
    with serving(model, optimizer_of("sgd"), servers=servers) as farm:
        worker = farm.client()
        worker.pull(tensors_of(model))
        told = a_step(farm, worker, model, [torch.ones_like(param) for param in model.parameters()])
        worker.close()
    assert [server for server, count in told.items() if not 0.9 < count / (2 * size / servers) < 1.1] == []
    assert sum(told.values()) <= 2 * size + 2 * HEADS * servers


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
    assert first - second == 4 * 100 * 101
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


def test_sparse_gradients_of_several_shards_are_summed_row_by_row() -> None:
    model = Table()
    grads = [sparse_gradients(model, rows, shard) for shard, rows in enumerate([[3, 700], [5, 3]])]
    sums = [one.to_dense() + other.to_dense() for one, other in zip(*grads, strict=True)]
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        for key, given in zip("ab", grads, strict=True):
            farm.chief.push(key, given)
        norm = farm.chief.sum(["a", "b"], AggregationOptions(check_finite=True, norms=True)).total()
        farm.chief.apply(version=1, lr_factor=1.0)
        found = farm.chief.state()["param/embed.weight"]
    torch.testing.assert_close(found, model.embed.weight.detach() - 0.1 * sums[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat([one.flatten() for one in sums])))


def test_the_traffic_of_a_table_grows_with_the_rows_touched_and_not_with_the_table() -> None:
    model = Table(1_000, 64)
    touched = {}
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        worker, into = farm.client(), [None, *tensors_of(model)[1:]]
        worker.pull(into)
        for count in (100, 200, 400):
            wanted = torch.randperm(1_000, generator=torch.Generator().manual_seed(1))[:count]
            grads = sparse_gradients(model, wanted.tolist(), 1)
            steps = (partial(worker.push, "a", grads), partial(worker.pull_rows, 0, wanted), partial(worker.pull, into))
            touched[count] = sum(sum(moved(worker, step).values()) for step in steps)
        worker.close()
    assert touched[100] < 1.2 * 100 * (2 * 64 * 4 + 4 + 8) + 4 * 2 * 200
    assert 1.8 < (touched[400] - touched[200]) / (touched[200] - touched[100]) < 2.2
    assert touched[400] / touched[100] > 4 / 1.2
