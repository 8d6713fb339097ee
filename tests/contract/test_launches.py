"""How many kernels a step of a convnet asks a GPU for; most once went to the buffers of its batch normalisation."""

import pytest
import torch
from torch import nn

from tests.contract.stepping import Case, _Rank
from tests.support.launches import Launches
from trainkit.strategies.core.step import SmallGrads


# 194 and 755; with an operation a buffer, and one for each gradient of a later shard, there were 535 and 1,750
@pytest.mark.parametrize(("shards", "most"), [(1, 200), (4, 780)])
def test_a_step_asks_for_less_than_half_of_the_launches_that_a_loop_over_buffers_took(shards: int, most: int) -> None:
    rank = _Rank(None, Case(task="resnet", global_size=8, micro_size=8 // shards, precision="fp32"))
    executor = rank.setup(0)
    rank.steps(executor, 1)
    with Launches() as launches:
        rank.steps(executor, 2)
    assert launches.total <= most, launches.by_name.most_common(8)


def test_a_gradient_that_a_shard_does_not_use_stays_as_it_is() -> None:
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad, idle.grad = torch.ones(2), torch.full((2,), 5.0)
    earlier = SmallGrads([used, idle])
    (3.0 * used).sum().backward()  # type: ignore[no-untyped-call]
    earlier.add_up()
    assert (used.grad.tolist(), idle.grad.tolist()) == ([4.0, 4.0], [5.0, 5.0])
