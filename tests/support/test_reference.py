"""The oracle itself, against what can be written out by hand."""

import torch
from torch import nn

from tests.support import reference


def mean_square(model: nn.Module, batch: reference.Sample) -> tuple[torch.Tensor, float]:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).sum(), len(inputs)


def test_the_order_of_an_epoch_is_a_permutation_of_its_own() -> None:
    assert reference.order(7, seed=0, epoch=0) == [2, 1, 6, 4, 3, 0, 5]
    assert reference.order(7, seed=0, epoch=1) != reference.order(7, seed=0, epoch=0)
    assert reference.order(7, seed=1, epoch=0) != reference.order(7, seed=0, epoch=0)
    for num_samples in (1, 2, 3, 16, 17, 1000):
        assert sorted(reference.order(num_samples, seed=3, epoch=2)) == list(range(num_samples))


def test_a_batch_is_cut_into_nearly_equal_shards() -> None:
    assert reference.cut(range(10), 4) == [range(4), range(4, 7), range(7, 10)]
    assert reference.cut(range(5), 8) == [range(5)]


def test_one_step_of_sgd_on_one_weight_is_the_formula() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 2.0)
    samples = [(torch.tensor([1.0]), torch.tensor([0.0])), (torch.tensor([3.0]), torch.tensor([0.0]))]
    trained = reference.train(
        model, samples, mean_square, optimizer=reference.sgd(), rate=lambda _: 0.05, num_steps=1, global_size=2
    )
    # the mean of (w x)^2 is 4 (1 + 9) / 2 = 20, its gradient 2 w (1 + 9) / 2 = 20
    assert trained.losses == [20.0]
    assert trained.model.state_dict()["weight"].item() == 1.0
    assert model.weight.item() == 2.0


def test_shards_change_nothing_but_batch_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    samples = [(torch.randn(3), torch.randn(1)) for _ in range(11)]
    runs = [
        reference.train(
            model,
            samples,
            mean_square,
            optimizer=reference.adamw(),
            rate=lambda _: 0.01,
            num_steps=7,
            global_size=4,
            micro_size=micro_size,
            max_norm=0.5,
        )
        for micro_size in (None, 3, 1)
    ]
    assert [len(batch) for batch in runs[0].samples] == [4, 4, 3, 4, 4, 3, 4]
    for run in runs[1:]:
        assert reference.differences(dict(run.model.state_dict()), runs[0]) == []


def test_a_difference_is_named_with_its_size() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    trained = reference.Trained(model=model.double(), gradient_norms={"weight": 1.0})
    assert reference.differences({"weight": torch.tensor([[2.0]])}, trained) == []
    assert reference.differences({"weight": torch.tensor([[2.2]])}, trained) == ["weight: relative error 0.1"]
    assert reference.differences({}, trained) == ["weight: missing"]
