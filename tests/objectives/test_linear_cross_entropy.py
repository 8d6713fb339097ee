"""A chunk of scores that is lost, counted twice or rounded too early is caught here alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.scores import ScoreBytes
from trainkit.objectives import linear_cross_entropy as chunked
from trainkit.objectives.linear_cross_entropy import score_rows

ROWS, FEATURES, WORDS = 37, 6, 29

linear_cross_entropy = partial(chunked.linear_cross_entropy, few=0)


def made(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which every fifth does not count."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for shape in ((ROWS, FEATURES), (WORDS, FEATURES), (WORDS,))
    )
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight, bias)
    scores = scores if scores.dtype is torch.float64 else scores.float()
    return functional.cross_entropy(scores, targets, reduction="sum")


def grads(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 0.37, tensors)


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
@pytest.mark.parametrize("size", [1, 8 * WORDS * 10], ids=["least", "ten rows"])
def test_the_loss_and_its_gradients_are_those_of_all_scores(
    size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", size)
    hidden, weight, bias, targets = made(scale=scale)

    found = linear_cross_entropy(hidden, weight, targets, bias=bias)
    expected = plain(hidden, weight, bias, targets)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(grads(found, hidden, weight, bias), grads(expected, hidden, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
def test_in_bfloat16_gradients_are_as_exact_as_those_of_all_scores(scale: float) -> None:
    hidden, weight, bias, targets = made(torch.bfloat16, scale=scale)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = grads(plain(exact[0], exact[1], exact[2], targets), *exact)

    found = grads(linear_cross_entropy(hidden, weight, targets, bias=bias), hidden, weight, bias)
    before = grads(plain(hidden, weight, bias, targets), hidden, weight, bias)

    for one, other, true in zip(found, before, wanted, strict=True):
        assert (one - true).norm() <= 1.2 * (other - true).norm()


def test_a_nearly_certain_target_keeps_its_small_gradient_in_bfloat16() -> None:
    # 1 - 2**-9 is 1 in bfloat16: what remains is counted from the others
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    losses, gradient = score_rows(scores, torch.tensor([0]))

    expected = functional.cross_entropy(scores.double(), torch.tensor([0]))
    assert float(losses) == pytest.approx(float(expected), rel=4e-3)
    assert float(-gradient[0, 0]) == pytest.approx(float(1 - scores.double().softmax(1)[0, 0]), rel=1e-2)


def test_a_target_whose_probability_underflows_has_a_finite_loss() -> None:
    scores = torch.tensor([[0.0, 200.0, 199.0]])
    losses, gradient = score_rows(scores, torch.tensor([0]))

    torch.testing.assert_close(losses, functional.cross_entropy(scores, torch.tensor([0]), reduction="none"))
    assert float(gradient[0, 0]) == -1


def test_a_frozen_layer_costs_no_gradient_and_targets_alone_that_do_not_count_give_zero() -> None:
    hidden, weight, _, targets = made()
    frozen = weight.detach()

    loss = linear_cross_entropy(hidden, frozen, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        hidden.grad, *torch.autograd.grad(plain(hidden, frozen, None, targets), hidden), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()  # type: ignore[no-untyped-call]

    nothing = linear_cross_entropy(hidden, weight, torch.full((ROWS,), -100))
    assert float(nothing.detach()) == float(grads(nothing, weight)[0].abs().max()) == 0


def bytes_a_score(compute: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """(bytes moved, most bytes alive) of tensors as large as the scores of a chunk, by the number of scores."""
    rows, words, features = 256, 1024, 16
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 2 * words * 64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, features, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(words, features, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(words, (rows,), generator=generator)
    with ScoreBytes(at_least=64 * words) as counted:
        compute(hidden, weight, targets).backward()
    return counted.moved / (rows * words), counted.peak / (rows * words)


def test_in_bfloat16_fourteen_bytes_a_score_are_moved_and_one_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, alive = bytes_a_score(linear_cross_entropy, monkeypatch)

    assert moved <= 14  # written, read thrice; its gradient written, read for the target, and by two products
    assert alive <= 1  # two tensors of a chunk, a quarter of the rows

    moved, alive = bytes_a_score(lambda hidden, weight, targets: plain(hidden, weight, None, targets), monkeypatch)
    assert moved > 40
    assert alive >= 10
