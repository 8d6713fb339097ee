"""What is drawn where activations are cut differs from rank to rank; what is drawn outside does not."""

import torch

from trainkit.strategies.tensor_parallel.cutting import ActivationRngRegions


def drawn(place: int) -> list[float]:
    """Before, in and after a stretch of cut activations, in a block that all ranks enter with one key."""
    regions = ActivationRngRegions(place=place, devices=[torch.device("cpu")], draws=True)
    torch.default_generator.manual_seed(7)
    numbers = [float(torch.rand(()))]
    regions.enter("query")
    regions.enter("key")  # the second of several layers that are cut side by side
    numbers.append(float(torch.rand(())))
    regions.leave("project")
    numbers.append(float(torch.rand(())))
    return numbers


def test_ranks_draw_apart_inside_alone() -> None:
    (before, inside, after), (same, other, again) = drawn(0), drawn(1)
    assert (before, after) == (same, again)
    assert len({before, inside, other, after}) == 4


def test_a_recomputation_draws_the_same() -> None:
    assert drawn(1) == drawn(1)


def test_a_model_that_draws_nothing_leaves_the_generators_alone() -> None:
    regions = ActivationRngRegions(place=1, devices=[torch.device("cpu")], draws=False)
    torch.default_generator.manual_seed(7)
    regions.enter("query")
    assert torch.default_generator.initial_seed() == 7
