"""Numbers drawn in a step that depend on what another block, thread or use drew before are caught here alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from tests.support import drawing_models, zoo
from trainkit.numerics.generators import GENERATORS_LOCK, GeneratorStates, Untouched
from trainkit.numerics.randomness import BlockKeys, Drawing, keys_of

CPU = torch.device("cpu")


class Around(nn.Module):
    """Draws after each of its layers, of which the first may draw too, or not."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return torch.stack([torch.rand_like(hidden), torch.rand_like(self.second(hidden))])


class Objects:
    """Stands for an objective of a user's own."""


def drawn(model: nn.Module, *, step: int = 0, shard: int = 0, objective: object = None) -> Tensor:
    keys = keys_of(model) or BlockKeys(model, seed=1, devices=[CPU])
    keys.enter(step=step, shard=shard, objective=objective)
    outputs: Tensor = model(torch.ones(8))
    return outputs


def test_an_objective_draws_other_numbers_in_every_step_and_shard() -> None:
    model = nn.Linear(2, 2)
    keys = BlockKeys(model, seed=1, devices=[CPU])

    def noise(step: int, shard: int) -> float:
        keys.enter(step=step, shard=shard, objective=Objects())
        return float(torch.rand(()))

    numbers = {noise(step, shard) for step in range(32) for shard in range(2)}
    assert len(numbers) == 64
    assert noise(5, 1) == noise(5, 1)


def test_an_objective_draws_the_same_after_the_model_whatever_that_drew() -> None:
    after = []
    for model in (nn.Identity(), nn.Dropout(0.5), Around(nn.Dropout(0.5))):
        drawn(model, objective=Objects())
        after.append(torch.rand(3))
        model(torch.ones(8))
        after.append(torch.rand(3))
    assert torch.equal(torch.stack(after[:2]), torch.stack(after[2:4]))
    assert torch.equal(torch.stack(after[:2]), torch.stack(after[4:]))
    assert not torch.equal(after[0], after[1])


def test_code_after_a_block_draws_the_same_whatever_the_block_drew() -> None:
    silent, loud = drawn(Around(nn.Identity())), drawn(Around(nn.Dropout(0.5)))
    assert torch.equal(silent, loud)
    assert not torch.equal(silent[0], silent[1])


def test_a_model_that_is_run_twice_on_a_shard_draws_twice() -> None:
    model = zoo.Net(dropout=0.5).train()
    keys = BlockKeys(model, seed=1, devices=[CPU])
    keys.enter(step=0, shard=0)
    inputs = torch.ones(4, zoo.FEATURES)
    assert not torch.equal(model(inputs), model(inputs))


def test_python_and_numpy_are_keyed_for_code_of_a_users_own() -> None:
    def numbers(step: int) -> tuple[float, float]:
        drawn(Around(nn.Identity()), step=step)
        return random.random(), float(np.random.rand())  # noqa: NPY002

    assert numbers(0) == numbers(0)
    assert numbers(0)[0] != numbers(1)[0]
    assert numbers(0)[1] != numbers(1)[1]


def test_what_draws_is_seen_before_a_strategy_changes_the_classes() -> None:
    model = drawing_models.FunctionalDropout()
    drawing = Drawing.of(model)
    for child in model.children():
        child.__class__ = type("Sharded", (type(child),), {})  # as fully_shard does
    assert Drawing.of(model) != drawing
    keys = BlockKeys(model, seed=1, devices=[CPU], drawing=drawing)
    assert keys.names == BlockKeys(drawing_models.FunctionalDropout(), seed=1, devices=[CPU]).names == ("",)


def test_generators_are_restored_after_another_use_and_a_thread_that_draws_waits_for_it() -> None:
    def numbers() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002

    def drawn_around(*, used: bool) -> list[tuple[float, ...]]:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
        before = [numbers()]
        if used:
            with Untouched(seed=0), Untouched(seed=1), ThreadPoolExecutor(1) as threads:
                numbers()
                assert not threads.submit(GENERATORS_LOCK.acquire, blocking=False).result()
        return [*before, numbers()]

    assert drawn_around(used=True) == drawn_around(used=False)


def test_the_second_number_of_a_pair_counts_as_drawn() -> None:
    with Untouched(seed=0):
        np.random.standard_normal()  # noqa: NPY002 - NumPy keeps another one for the next call
        states = GeneratorStates()
        assert not states.moved()
        np.random.standard_normal()  # noqa: NPY002
        assert states.moved()
