"""An oracle that is wrong in the same way as the library is caught here alone: one step, written out by hand."""

import torch
from torch import nn

from tests.support import reference


def mean_square(model: nn.Module, batch: reference.Sample) -> tuple[torch.Tensor, float]:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).sum(), len(inputs)


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


def test_a_difference_is_named_with_its_size() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    trained = reference.Trained(model=model.double(), gradient_norms={"weight": 1.0})
    assert reference.differences({"weight": torch.tensor([[2.0]])}, trained) == []
    assert reference.differences({"weight": torch.tensor([[2.2]])}, trained) == ["weight: relative error 0.1"]
    assert reference.differences({}, trained) == ["weight: missing"]
