"""A model that sees tokens to come, or is not the published one, is caught here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests.support.refusing import refused
from trainkit.models.convnet import ConvNet
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.models.resnet import ResNet
from trainkit.numerics.randomness import blocks_of

TINY: dict[str, Any] = {"vocab_size": 11, "context": 8, "num_layers": 2, "num_heads": 2, "width": 8}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_resnets_have_as_many_parameters_as_published(depth: Literal[18, 34, 50, 101], parameters: int) -> None:
    with torch.device("meta"):
        assert count(ResNet(depth=depth)) == parameters


def test_a_resnet_starts_as_its_shortcuts() -> None:
    model = ResNet(depth=18, num_classes=5)
    zeroed: Any = model.blocks
    others: Any = ResNet(depth=18, zero_init_last_gamma=False).blocks
    assert all(not block.branch[-1].weight.any() for block in zeroed)
    assert all(block.branch[-1].weight.all() for block in others)


def test_a_gpt_sees_only_what_came_before() -> None:
    model = Gpt(**TINY)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5], after[0, 5])


def test_a_gpt_ties_its_embedding_to_its_output_and_is_cut_at_its_blocks() -> None:
    model = Gpt(**TINY)
    assert model.head.output.weight is model.embed.tokens.weight
    blocks: Any = model.blocks
    assert float(blocks[0].mlp.project.weight.detach().std()) == pytest.approx(0.01, rel=0.3)
    assert [name for name, _ in blocks_of(model)] == ["", "embed", "blocks.0", "blocks.1", "head"]


def test_attention_stays_wide_inside_autocast_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []
    attend = nn.functional.scaled_dot_product_attention

    def spy(queries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtypes.append(queries.dtype)
        return attend(queries, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Gpt(**TINY)(torch.zeros(1, 8, dtype=torch.int64)).dtype == torch.bfloat16

    assert dtypes == [torch.float32, torch.float32]


def test_a_gpt_continues_a_text_past_its_context_and_repeats_itself_from_one_seed() -> None:
    model = Gpt(**TINY, dropout=0.5)
    start = torch.tensor([[1, 2, 3]])

    first, second = (
        model.generate(start, num_tokens=9, top_k=3, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )

    assert first.shape == (1, 12)
    assert torch.equal(first, second)
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[-1]]), num_tokens=1)
    assert model.training


@pytest.mark.parametrize(("build", "key", "word"), [
    (lambda: Gpt(**{**TINY, "num_heads": 3}), "model.num_heads=3", "must divide model.width=8"),
    (lambda: Mlp(in_features=2, hidden=[0], out_features=1), "model.hidden=[0]", "1 or more"),
    (lambda: ConvNet(widths=[]), "model.widths=[]", "one width or more"),
    (lambda: ConvNet(widths=[2, 2, 2, 2], image_size=8), "model.widths=[2, 2, 2, 2]", "less than a pixel"),
])  # fmt: skip
def test_a_bad_size_is_refused(build: Callable[[], object], key: str, word: str) -> None:
    (problem,) = refused(build)
    assert problem.startswith(f"{key}: ")
    assert word in problem
