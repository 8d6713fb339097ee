"""A tensor of a model that is made alone, with other bits than in the model built whole, is caught here alone."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.present import present
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.models.resnet import ResNet
from trainkit.numerics.deferred import CannotDeferError, build_deferred, lazy_init_values


class Odd(nn.Module):
    """What constructors do besides drawing each parameter once."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.embed = nn.Embedding(7, 5, padding_idx=2)
        self.product = nn.Parameter(torch.randn(4, 4) @ torch.randn(4, 4) + torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(3, 5)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(30)))
        self.halved = nn.Linear(3, 3).half()
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.halved.weight
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("constant", torch.tensor([1, 2, 3]))
        self.register_buffer("transposed", torch.rand(4, 6).t())
        self.plain = [torch.ones(2), torch.rand(2)]
        self.permutation = torch.randperm(5).tolist()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.randn(6, generator=own))
        with torch.no_grad():
            self.own[1:3] = torch.randn(2, generator=own)
            self.own.mul_(2).add_(self.orthogonal[0, 0])


def bits(model: nn.Module, values: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor if values is None else values[name] for name, tensor in named}


MODELS = {
    "mlp": lambda: Mlp(in_features=6, hidden=[5, 4], out_features=3, batch_norm=True, dropout=0.1),
    "resnet": lambda: ResNet(depth=18, num_classes=3),
    "gpt": lambda: Gpt(vocab_size=11, context=8, num_layers=2, num_heads=2, width=8, bias=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "copies": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
    "odd": Odd,
}


@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_made_alone_has_the_bits_of_the_model_built_whole(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole, after = MODELS[name](), torch.default_generator.get_state()
        torch.manual_seed(3)
        model = build_deferred(MODELS[name])
        assert torch.equal(torch.default_generator.get_state(), after)
        found = bits(model, lazy_init_values(model))
        assert torch.equal(torch.default_generator.get_state(), after)  # making them draws nothing either
    assert all(tensor.is_meta for tensor in bits(model).values())
    assert list(found) == list(bits(whole)) == list(present(lazy_init_values(model)))
    for key, tensor in bits(whole).items():
        assert torch.equal(found[key], tensor), key
        assert (found[key].dtype, found[key].stride()) == (tensor.dtype, tensor.stride()), key


def test_what_a_module_keeps_besides_has_its_numbers() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = Odd()
        torch.manual_seed(3)
        model: Any = build_deferred(Odd)
    assert (model.rates, model.permutation) == (whole.rates, whole.permutation)
    assert all(torch.equal(one, other) for one, other in zip(model.plain, whole.plain, strict=True))
    assert model.tied.weight is model.halved.weight
    assert (model.own.is_meta, model.own.device.type) == (True, "meta")


def test_building_and_making_take_the_memory_of_one_tensor_at_a_time() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))

    list(present(lazy_init_values(build_deferred(lambda: nn.Linear(8, 8)))).values())  # what torch imports for it
    torch.ones(8).sum()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model = build_deferred(build)
    sums = [float(tensor.sum()) for tensor in present(lazy_init_values(model)).values()]
    assert len(set(sums)) == 24
    assert peak() - before < 5 * 4 * 2**20  # 24 x 4 MiB are the model's


def peak() -> int:
    """The most bytes this process has had in memory since it was last asked to forget."""
    status = Path("/proc/self/status").read_text()
    return int(present(re.search(r"VmHWM:\s+(\d+) kB", status))[1]) * 1024


def pickled() -> nn.Module:
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), io.BytesIO())
    return model


@pytest.mark.parametrize(("build", "why"), [
    (lambda: nn.ParameterList([nn.Parameter(torch.empty(2).resize_(3))]), "resize_"), (pickled, "pickle"),
    # it goes on after a refusal: it leaves out its base if the operation that computes it is not implemented
    (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 2)), "geqrf"),
])  # fmt: skip
def test_a_constructor_that_cannot_be_deferred_is_built_with_numbers(build: Any, why: str) -> None:
    with pytest.raises(CannotDeferError, match=why):
        build_deferred(build)
