"""Models that users bring, under every strategy but a pipeline: Python objects between blocks, writing in place.

A dataclass, dict or in-place write between blocks that a strategy copies, loses or refuses is caught here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from tests.contract.stepping import STRATEGIES, Case, train
from tests.support import object_models, refused_models
from tests.support.pool import Pool

KINDS: dict[str, type[nn.Module]] = object_models.EQUAL | refused_models.REFUSED
MODELS = ("ObjectBetweenBlocks", "ListBetweenBlocks", "DictBetweenBlocks", "Containers", "WritingInPlace")
"""A pipeline refuses the first three by name: tests/contract/test_pipeline_objects.py."""


@dataclass(frozen=True, kw_only=True)
class Untidy(Case):
    """A training of one of them; the last batch of an epoch is short."""

    named: str
    frozen: bool = False
    """Whether the second block is not trained."""
    global_size: int = 16
    micro_size: int = 4

    def make_model(self) -> nn.Module:
        """The model of its name."""
        model = KINDS[self.named]()
        if self.frozen:
            model.get_submodule("second").requires_grad_(requires_grad=False)
        return model


# FSDP gives blocks copies, and refuses by name a block that writes into them: tests/contract/test_block_arguments.py.
CASES = [
    (strategy, named)
    for strategy in STRATEGIES
    for named in MODELS
    if strategy not in ("one_device", "pipeline") and not (strategy in ("fsdp", "mesh") and named in MODELS[:3])
]


@pytest.mark.parametrize(("strategy", "named"), CASES)
def test_objects_between_blocks_and_writing_in_place_are_trained_as_on_one_device(
    strategy: str, named: str, pool: Pool
) -> None:
    # A strategy that copies the arguments of a block would lose what the block leaves in an object.
    frozen = named in ("ObjectBetweenBlocks", "WritingInPlace")
    case = Untidy(strategy=strategy, named=named, frozen=frozen, num_steps=6, rate_scale=0.3, resume_at=3)
    (alone,) = train(pool, replace(case, strategy="one_device", resume_at=None))
    for rank in train(pool, case):
        assert rank.losses == pytest.approx(alone.losses, rel=1e-12)
        for name, expected in alone.weights.items():
            torch.testing.assert_close(rank.weights[name], expected, rtol=1e-12, atol=1e-13)
