"""How many kernels a step of a convnet asks a GPU for; most once went to the buffers of its batch normalisation.

A step of a convnet that launches a kernel for every buffer or gradient again is caught here alone.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.contract.stepping import Case, _Rank
from tests.support import zoo
from tests.support.launches import Launches
from trainkit import api
from trainkit.models.resnet import ResNet
from trainkit.run.estimates.outlook import outlook_of
from trainkit.run.planning.plan import make_plan
from trainkit.run.session.account import counted_work
from trainkit.strategies.core.step import SmallGrads
from trainkit.trained.build import meta_model


def launches_of(case: Case) -> Launches:
    """What the second step of one device asks for."""
    rank = _Rank(None, case)
    executor = rank.setup(0)
    rank.steps(executor, 1)
    with Launches() as launches:
        rank.steps(executor, 2)
    return launches


# 201 and 757, 7 of which count targets; with an operation a buffer, and one for each gradient of a later shard, there
# were 535 and 1,750
@pytest.mark.parametrize(("shards", "most"), [(1, 205), (4, 780)])
def test_a_step_asks_for_less_than_half_of_the_launches_that_a_loop_over_buffers_took(shards: int, most: int) -> None:
    launches = launches_of(Case(task="resnet", global_size=8, micro_size=8 // shards, precision="fp32"))
    assert launches.total <= most, launches.by_name.most_common(8)


class SmallImages(zoo.InMemory):
    """16 images, for a ResNet-50 of full width: a step asks for as many launches as with larger images."""

    def __init__(self) -> None:
        self.inputs, self.targets = torch.randn(16, 3, 32, 32), torch.arange(16)


# 562 and 4,587; before buffers were joined 1,443 and 9,227, by the same count
@pytest.mark.parametrize(
    ("shards", "before"), [(1, 1443), pytest.param(8, 9227, marks=pytest.mark.long)], ids=["whole", "eighths"]
)
@pytest.mark.slow
def test_a_mixed_step_of_resnet_50_needs_at_most_half_of_its_earlier_launches(shards: int, before: int) -> None:
    model = {"depth": 50, "num_classes": 1000}
    wide = Case(task="resnet", build=ResNet, model=model, samples=SmallImages, precision="bf16_mixed")
    launches = launches_of(replace(wide, global_size=16, micro_size=16 // shards))
    assert launches.total <= before / 2, launches.by_name.most_common(8)


GPT_2 = (
    "model=gpt", "model.num_layers=12", "model.num_heads=12", "model.width=768", "model.context=1024",
    "model.vocab_size=50304", "data=synthetic_tokens", "data.vocab_size=50304", "data.context=1024",
    "data.num_samples=64", "data.val_samples=1", "objective=language_modelling", "objective.padding=false",
    "batch.global_size=64", "batch.micro_size=16", "clip.max_norm=1.0", "steps=10",
)  # fmt: skip


@pytest.mark.parametrize(("precision", "most"), [("bf16", 2270), ("bf16_mixed", 3660)])
@pytest.mark.slow
def test_a_step_of_gpt_2_of_four_shards_launches_no_more(precision: str, most: int) -> None:
    plan = make_plan(api.compose(["recipe=null", *GPT_2, f"precision={precision}"]).cfg)
    work = outlook_of(plan, meta_model(plan.cfg)).work
    assert work is not None
    counted = counted_work(work, None, plan)
    assert counted.launches is not None
    assert counted.launches <= most
    compiled = make_plan(api.compose(["recipe=null", *GPT_2, f"precision={precision}", "compile.mode=default"]).cfg)
    assert counted_work(work, None, compiled) == replace(counted, launches=None)


def test_a_gradient_that_a_shard_does_not_use_stays_as_it_is() -> None:
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad, idle.grad = torch.ones(2), torch.full((2,), 5.0)
    earlier = SmallGrads([used, idle])
    (3.0 * used).sum().backward()  # type: ignore[no-untyped-call]
    earlier.add_up()
    assert (used.grad.tolist(), idle.grad.tolist()) == ([4.0, 4.0], [5.0, 5.0])
