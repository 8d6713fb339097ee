"""Sparse gradients give the numbers of dense ones, wherever shards are computed, and fewer bytes.

A sparse gradient whose repeated rows are scaled, clipped or averaged once instead of each is caught here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.stepping import OPTIMIZERS, Case, _Rank, train
from tests.support import reference, zoo
from tests.support.pool import Place, Pool
from tests.support.present import present
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.core.step import gather_sparse, sparse_figures, with_values

pytestmark = pytest.mark.pairwise

PLACES = [("one_device", 1), ("mirrored", 1), ("mirrored", 2), ("mirrored", 3)]


class Lookup(nn.Module):
    """An embedding and a head, not tied: one sparse gradient and two dense ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.TOKENS, 4, sparse=sparse)
        self.head = nn.Linear(4, zoo.TOKENS)
        zoo.fill(self)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embed(tokens))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Words(Case):
    task: str = "tokens"
    sparse: bool = True

    def make_model(self) -> nn.Module:
        return Lookup(sparse=self.sparse)


def placed(case: Case, strategy: str, replicas: int) -> Case:
    return replace(case, strategy=strategy, settings={} if strategy == "one_device" else {"replicas": replicas})


@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
@pytest.mark.parametrize("optimizer", ["plain_sgd", "adagrad"])
def test_sparse_gradients_are_dense_ones_to_rounding(optimizer: str, strategy: str, replicas: int, pool: Pool) -> None:
    # batches of 8 and 5 sequences in shards of 2: accumulated, counted weights, and a clip that is felt
    case = placed(Words(optimizer=optimizer, micro_size=2, max_norm=0.05), strategy, replicas)
    make = OPTIMIZERS[optimizer]
    dense = replace(case, sparse=False)
    assert_reference(train(pool, case), dense, optimizer=lambda named: make([param for _, param in named]))


def of_the_table() -> nn.Module:
    """SparseAdam takes no dense gradient: the embedding alone is trained."""
    model = Lookup(sparse=True)
    model.head.requires_grad_(False)
    return model


def test_sparse_adam_is_the_same_on_any_number_of_replicas(pool: Pool) -> None:
    base = Case(task="tokens", build=of_the_table, optimizer="sparse_adam", micro_size=2)
    assert_close(train(pool, placed(base, "mirrored", 3)), alone(base))


# in bf16 a dense backward pass adds the rows of a word in 8 bits, a sparse one leaves them to be added in the masters'
@pytest.mark.parametrize(("precision", "tolerance"), [("fp16_mixed", 1e-5), ("bf16", 2.0**-8)])
def test_sparse_gradients_are_scaled_and_kept_in_masters_like_dense_ones(
    precision: str, tolerance: float, pool: Pool
) -> None:
    sparse = Words(precision=precision, optimizer="plain_sgd", micro_size=2, strategy="mirrored")
    sparse = replace(sparse, settings={"replicas": 2})
    expected = train(pool, replace(sparse, sparse=False))[0].weights
    for name, tensor in train(pool, sparse)[0].weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=0.1 * tolerance)


def test_a_reproducible_run_makes_them_dense_and_keeps_its_bits(pool: Pool) -> None:
    base = Words(precision="fp32", optimizer="plain_sgd", micro_size=2, reproducible=True)
    expected = train(pool, placed(replace(base, sparse=False), "one_device", 1))[0].state
    for count in (1, 3):
        for rank in train(pool, placed(base, "mirrored", count)):
            assert all(torch.equal(tensor, rank.state[key]) for key, tensor in expected.items())


def test_momentum_of_sparse_gradients_is_saved_as_a_dense_tensor(pool: Pool) -> None:
    case = replace(Words(optimizer="sgd", micro_size=2), num_steps=4)
    whole = train(pool, case)[0]
    assert whole.state["optimizer/momentum_buffer/embed.weight"].layout is torch.strided
    parts = train(pool, replace(case, resume_at=2))[0]
    torch.testing.assert_close(parts.weights["embed.weight"], whole.weights["embed.weight"], rtol=1e-12, atol=1e-14)


def test_what_is_spared_is_measured() -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[3, 3, 7]]), torch.ones(3, 4), (100, 4))
    total, sent = gather_sparse(grad, torch.zeros(100, 4), sparse_dim=1, collective=LocalCollective())
    assert total.coalesce().indices().tolist() == [[3, 7]]
    assert sent == 2 * (4 + 4 * 4)  # an index of 4 bytes and 4 floats a row
    figures = sparse_figures({0: total}, sent, num_ranks=2)
    assert figures == {"sparse_density": 0.02, "sparse_saved_mb": (100 * 4 * 4 - 40) / 2**20}


def test_numbers_of_sparse_gradients_are_changed_in_place() -> None:
    grads, values = with_values(
        [torch.ones(2), None, torch.sparse_coo_tensor(torch.tensor([[1, 1]]), [1.0, 2.0], (3,))]
    )
    torch._foreach_mul_(values, 2.0)
    assert present(grads[0]).tolist() == [2.0, 2.0]
    assert present(grads[2]).to_dense().tolist() == [0.0, 6.0, 0.0]


def figures_of(place: Place, case: Case) -> dict[str, float]:
    rank = _Rank(place, case)
    executor = rank.setup(0)
    rank.steps(executor, 1)
    executor.close()
    return executor.local.step_metrics


def test_a_step_says_how_dense_its_sparse_gradients_are_and_what_that_spares(pool: Pool) -> None:
    case = Words(strategy="mirrored", settings={"replicas": 2}, optimizer="plain_sgd", global_size=2, micro_size=1)
    words = {int(word) for index in reference.order(29, seed=3, epoch=0)[:2] for word in case.make_data()[index][0]}
    for found in pool.run("tests.contract.test_sparse.figures_of", case, num_ranks=2):
        assert found["sparse_density"] == len(words) / zoo.TOKENS
        assert found["sparse_saved_mb"] < zoo.TOKENS * 4 * 8 / 2**20
