"""A convnet whose weights have their channels last is the same training to rounding, under every strategy.

A convnet in channels-last whose weights fall back to contiguous, or whose numbers change is caught here alone.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.contract.checks import assert_reference
from tests.contract.stepping import Case, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.mesh.strategy import Fsdp
from trainkit.strategies.model_transforms import (
    ModelTransforms,
    apply_transforms,
    format_for,
    shaping_notes,
    shaping_problems,
)

LAST = ModelTransforms(memory_format="channels_last")
CASE = Case(task="resnet", global_size=8, micro_size=4, num_steps=4, shaping=LAST)


@pytest.mark.parametrize(
    "strategy", ["one_device", "mirrored", "mesh", "pipeline", pytest.param("central_storage", marks=pytest.mark.long)]
)
def test_steps_are_those_of_the_contiguous_reference(strategy: str, pool: Pool) -> None:
    case = replace(CASE, strategy=strategy, settings={"replicate": 2, "shard": 1} if strategy == "mesh" else {})
    assert_reference(train(pool, replace(case, resume_at=2)), case)


def test_weights_and_features_have_their_channels_last() -> None:
    model = apply_transforms(zoo.small_resnet(), LAST)
    seen: list[torch.Tensor] = []
    blocks = model.get_submodule("blocks")
    blocks.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    model(torch.ones(2, 3, 16, 16))
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in [*weights, *seen])


def test_weights_of_five_dims_stay_as_they_are() -> None:
    model = apply_transforms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)), LAST)
    assert [weight.stride() for weight in model.parameters() if weight.dim() > 1] == [(27, 1, 9, 3), (81, 27, 9, 3, 1)]


@pytest.mark.parametrize(
    ("value", "device", "chosen"),
    [("bf16_mixed", "cuda:0", "auto"), ("fp32", "cuda:0", "contiguous"), ("bf16_mixed", "cpu", "contiguous")],
)
def test_auto_chooses_channels_last_for_16_bits_on_cuda(value: str, device: str, chosen: str) -> None:
    assert format_for("auto", Precision(value=value), device) == chosen  # type: ignore[arg-type]
    assert format_for("channels_last", Precision(value=value), device) == "channels_last"  # type: ignore[arg-type]


def test_auto_leaves_a_model_without_convolutions_alone_and_an_explicit_format_is_refused_there() -> None:
    model = nn.Linear(2, 2)
    assert shaping_notes(model, ModelTransforms(memory_format="auto")) == ()
    assert shaping_problems(model, ModelTransforms(memory_format="auto"), compiles="model", strategy="") == []
    assert shaping_problems(model, LAST, compiles="model", strategy="") == [
        Problem(
            key="memory_format",
            value="channels_last",
            rule="has no effect: the model has no nn.Conv2d. Leave it out.",
        )
    ]


def test_a_note_names_the_memory_format_that_auto_chose() -> None:
    (note,) = shaping_notes(zoo.small_resnet(), ModelTransforms(memory_format="auto"))
    assert note == (
        "memory_format: channels_last (auto: convolutions in 16 bits on CUDA). Results differ from contiguous ones by "
        "rounding."
    )


@pytest.mark.parametrize("reproducible", [False, True])
def test_cudnn_times_its_kernels_unless_bits_are_promised(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    Precision().apply_globally("cuda", reproducible=reproducible)
    assert torch.backends.cudnn.benchmark is not reproducible


def test_a_strategy_that_shards_parameters_refuses_channels_last() -> None:
    with pytest.raises(ConfigError, match="memory_format=channels_last: has no effect on sharded parameters"):
        format_for("channels_last", Precision(), "cpu", is_kept=Fsdp.facts.keeps_memory_format)
    assert format_for("auto", Precision(value="bf16_mixed"), "cuda:0", is_kept=False) == "contiguous"
