"""Models that users bring, under every strategy but a pipeline: Python objects between blocks, writing in place.

A dataclass, dict or in-place write between blocks that a strategy copies, loses or refuses is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from tests.contract.checks import alone, assert_close
from tests.contract.stepping import STRATEGIES, Case, train
from tests.support import object_models, refused_models
from tests.support.pool import Pool

KINDS: dict[str, type[nn.Module]] = object_models.EQUAL | refused_models.REFUSED
MODELS = ("ObjectBetweenBlocks", "ListBetweenBlocks", "DictBetweenBlocks", "Containers", "WritingInPlace")
"""A pipeline refuses the first three by name: tests/contract/test_pipeline_objects.py."""


def untidy(named: str) -> nn.Module:
    """Build a model by name; of some the second block is not trained."""
    model = KINDS[named]()
    if named in ("ObjectBetweenBlocks", "WritingInPlace"):
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
    short = Case(global_size=16, micro_size=4, rate_scale=0.3, resume_at=3)  # the last batch of an epoch
    case = replace(short, build=untidy, model={"named": named}, strategy=strategy)
    assert_close(train(pool, case), alone(case), atol=1e-13)
