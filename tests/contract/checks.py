"""What the ranks of a case ended with, held to the oracle or to another training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.stepping import Case, Trained, oracle, run_rank
from tests.support import reference


def alone(case: Case) -> Trained:
    """What one device makes of a case, without an interruption."""
    return run_rank(None, replace(case, strategy="one_device", settings={}, resume_at=None))


def assert_reference(ranks: Sequence[Trained], case: Case, **others: Any) -> Sequence[Trained]:
    """Hold each rank's weights and losses to the oracle, its norms to those of the others; return the ranks."""
    expected = oracle(case, **others)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)
        assert rank.norms == ranks[0].norms
    return ranks


def assert_close(
    ranks: Sequence[Trained], expected: Trained, *, rtol: float = 1e-12, atol: float = 1e-14
) -> Sequence[Trained]:
    """Hold each rank's weights and losses to another training; return the ranks."""
    for rank in ranks:
        torch.testing.assert_close(rank.weights, expected.weights, rtol=rtol, atol=atol)
        assert rank.losses == pytest.approx(expected.losses, rel=rtol)
    return ranks


def assert_bits(ranks: Sequence[Trained], expected: Trained) -> Sequence[Trained]:
    """Hold each rank's state and loss scale to the bits of another training; return the ranks."""
    for rank in ranks:
        assert [key for key, tensor in expected.state.items() if not torch.equal(tensor, rank.state[key])] == []
        assert rank.scale == expected.scale
    return ranks
