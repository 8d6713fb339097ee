"""Activation checkpointing and compiling change where numbers are kept and how fast they come, never the numbers.

A recomputed or compiled block that draws another mask, or begins with changed buffers is caught here alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests.contract.running import run
from tests.support import zoo
from tests.support.present import present
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.models.resnet import ResNet
from trainkit.numerics.randomness import BlockKeys
from trainkit.strategies.core.graphs import shards
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.mesh.strategy import TensorParallel
from trainkit.strategies.model_transforms import (
    GraphSettings,
    ModelTransforms,
    apply_transforms,
    shaping_notes,
    shaping_problems,
)
from trainkit.strategies.model_transforms.compiling import Compiled, is_compiled

pytestmark = pytest.mark.pairwise

EAGERLY: dict[str, Any] = {"compile_mode": "default", "backend": "aot_eager"}
FULL, SELECTIVE = ModelTransforms(recompute="full"), ModelTransforms(recompute="selective")
COMPILED = ModelTransforms(**EAGERLY)


def gpt(**settings: Any) -> Gpt:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gpt(vocab_size=11, context=8, num_layers=3, num_heads=2, width=8, **settings)


TOKENS = torch.arange(16).reshape(2, 8) % 11


def two_shards(
    shaping: ModelTransforms, compiles: Literal["model", "blocks", "nothing"] = "blocks"
) -> tuple[list[torch.Tensor], list[str]]:
    """Outputs and gradients of two shards whose forwards both ran before either's backward, as in a pipeline."""
    model = apply_transforms(gpt(dropout=0.3), shaping, compiles=compiles)
    keys = BlockKeys(model, seed=1, devices=[])
    outputs = []
    for shard in (1, 2):
        keys.enter(step=2, shard=shard)
        outputs.append(model(TOKENS))
    for output in outputs:
        output.square().sum().backward()
    return [*outputs, *(param.grad for param in model.parameters())], list(model.state_dict())


@pytest.mark.parametrize(
    "shaping",
    [
        FULL,
        SELECTIVE,
        ModelTransforms(recompute=2),
        ModelTransforms(recompute=["_Attention"]),
        COMPILED,
        ModelTransforms(recompute="full", **EAGERLY),
        ModelTransforms(recompute=["_Attention"], **EAGERLY),
    ],
    ids=["full", "selective", "every_second", "by_class", "compiled", "both", "both_by_class"],
)
@pytest.mark.parametrize("compiles", ["blocks", "model"])
@pytest.mark.slow
def test_masks_gradients_and_names_are_those_of_the_model_as_it_is(
    shaping: ModelTransforms, compiles: Literal["model", "blocks"]
) -> None:
    (expected, names), (found, others) = two_shards(ModelTransforms()), two_shards(shaping, compiles)
    assert names == others
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Nested(nn.Module):
    """A block with blocks inside, which are keyed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def test_blocks_inside_a_recomputed_one_draw_the_masks_of_their_shard() -> None:
    found = []
    for shaping in (ModelTransforms(), FULL):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = apply_transforms(nn.Sequential(Nested(), Nested()), shaping)
        keys = BlockKeys(model, seed=1, devices=[])
        inputs, outputs = torch.ones(50, 2), []
        for shard in (1, 2):
            keys.enter(step=2, shard=shard)
            outputs.append(model(inputs))
        for output in outputs:
            output.square().sum().backward()
        found.append([*outputs, *(param.grad for param in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def kept_bytes(shaping: ModelTransforms) -> int:
    """What backward is kept for, parameters apart."""
    model = apply_transforms(gpt(), shaping)
    own, kept = {param.untyped_storage().data_ptr() for param in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # so that no two of them have one address
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(TOKENS)
    return sum(kept.values())


def test_recomputing_keeps_the_inputs_of_blocks_alone() -> None:
    whole, every, half = (kept_bytes(ModelTransforms(recompute=asked)) for asked in ("none", "full", 2))
    block = 2 * 8 * 8 * 4  # samples x length x width of float32
    assert every < half < whole
    assert whole - every > 3 * 10 * block  # what each of three blocks makes is ten times its input and more


@pytest.mark.slow
def test_a_recomputation_leaves_batch_statistics_as_it_found_them() -> None:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for shaping in (ModelTransforms(), FULL, SELECTIVE):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = apply_transforms(ResNet(depth=18, num_classes=3), shaping)
        for _ in range(2):
            model(images).sum().backward()
        found.append({**dict(model.named_buffers()), **{name: p.grad for name, p in model.named_parameters()}})
    for name, tensor in found[0].items():
        assert all(torch.equal(present(tensor), present(one[name])) for one in found)
    assert {int(present(tensor)) for name, tensor in found[1].items() if name.endswith("num_batches_tracked")} == {2}


class Counting(nn.Module):
    """Its output depends on a buffer that it updates."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        outputs: torch.Tensor = self.linear(inputs)
        return outputs.tanh() * self.count


def test_a_recomputation_begins_with_the_buffers_of_the_first_computation() -> None:
    inner = Counting()
    model = apply_transforms(nn.Sequential(inner), FULL)
    with torch.no_grad():
        inner.linear.weight.fill_(0.5)
        inner.linear.bias.zero_()
    inputs = torch.ones(1, 2, requires_grad=True)
    first, second = model(inputs), model(inputs)
    assert float(second.detach().sum() / first.detach().sum()) == 2.0
    (grad,) = torch.autograd.grad(second.sum(), inputs)
    (other,) = torch.autograd.grad(first.sum(), inputs)
    assert torch.equal(grad, 2 * other)
    assert float(inner.count) == 2.0


def test_a_torch_that_compiles_no_gradients_compiles_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "compiles_gradients", lambda: False)
    request: Any = SimpleNamespace(graphs=GraphSettings(covers="shard", backend="aot_eager"), training=None)
    replica: Any = None
    assert shards.makers_of(request, replica, ShardStep) == (ShardStep, None)


@pytest.mark.slow
def test_evaluation_and_a_copy_of_a_shaped_model_compute_the_same() -> None:
    model = apply_transforms(gpt(), ModelTransforms(recompute="full", **EAGERLY))
    expected = gpt().eval()(TOKENS)
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS), expected)
        other = copy.deepcopy(model)
        next(model.parameters()).zero_()
        assert torch.equal(other(TOKENS), expected)


def mlp() -> nn.Module:
    return Mlp(in_features=2, hidden=[2], out_features=2)


ODD: dict[str, Any] = {"compile_mode": "max-autotune", "backend": "aot_eager"}
UNKNOWN: dict[str, Any] = {"compile_mode": "default", "backend": "aot_eagr"}


@pytest.mark.parametrize(("make", "shaping", "compiles", "key", "word"), [
    (gpt, ModelTransforms(recompute=["_Atention"]), "model", "activation_checkpointing=_Atention", "mean _Attention?"),
    (gpt, ModelTransforms(recompute=4), "model", "activation_checkpointing=4", "has 3 blocks. Use 3 or less."),
    (gpt, ModelTransforms(recompute=[]), "model", "activation_checkpointing=[]", "names no class"),
    (mlp, FULL, "model", "activation_checkpointing=full", "there are: Linear, Mlp, ReLU, Sequential."),
    (mlp, COMPILED, "blocks", "compile.mode=default", "mine compiles blocks, and the model has no block"),
    (gpt, COMPILED, "nothing", "compile.mode=default", "mine cannot compile"),
    (gpt, ModelTransforms(**ODD), "model", "compile.mode=max-autotune", "no effect with compile.backend=aot_eager"),
    (gpt, ModelTransforms(**UNKNOWN), "model", "compile.backend=aot_eagr", "Did you mean aot_eager?"),
])  # fmt: skip
def test_transforms_that_a_model_or_strategy_does_not_support_are_problems_before_the_start(
    make: Callable[[], nn.Module], shaping: ModelTransforms, compiles: Any, key: str, word: str
) -> None:
    (problem,) = shaping_problems(make(), shaping, compiles=compiles, strategy="mine")
    assert str(problem).startswith(f"{key}: ")
    assert word in str(problem)


def test_nothing_is_compiled_for_a_strategy_that_compiles_nothing() -> None:
    assert not is_compiled(apply_transforms(gpt(), COMPILED, compiles="nothing"))
    assert is_compiled(apply_transforms(gpt(), COMPILED, compiles=TensorParallel.facts.compiles))


def test_no_compiler_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = shaping_problems(gpt(), ModelTransforms(compile_mode="default"), compiles="model", strategy="mine")
    assert str(problem) == (
        "compile.mode=default: needs a C++ compiler, and there is none here. Install one, such as g++, or leave it out."
    )


def test_max_autotune_uses_no_cuda_graphs() -> None:
    model = apply_transforms(gpt(), ModelTransforms(compile_mode="max-autotune"), compiles="model")
    modes = {module.forward.mode for module in model.modules() if isinstance(module.forward, Compiled)}
    assert modes == {"max-autotune-no-cudagraphs"}
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert options["max_autotune"]
    assert not options.get("triton.cudagraphs")


def test_a_note_of_a_compiled_model_with_dropout_states_that_its_masks_differ() -> None:
    compiled = ModelTransforms(compile_mode="default")
    assert shaping_notes(gpt(dropout=0.1), compiled) == (
        "compile.mode: random numbers of the model differ from those of an eager run, with the same distribution.",
    )
    assert shaping_notes(zoo.Net(), compiled) == shaping_notes(gpt(dropout=0.1), COMPILED) == ()


@pytest.mark.slow
def test_a_run_with_both_ends_in_the_bits_of_one_with_neither(tmp_path: Any) -> None:
    fixed = (
        "recipe=null", "model=gpt", "model.vocab_size=32", "model.context=8", "model.num_layers=2", "model.num_heads=2",
        "model.width=8", "model.dropout=0.2", "data=synthetic_tokens", "data.vocab_size=32", "data.context=8",
        "objective=language_modelling", "batch.global_size=16", "batch.micro_size=6", "steps=3",
    )  # fmt: skip
    asked = ("activation_checkpointing=full", "compile.mode=default", "compile.backend=aot_eager")
    one, other = run(tmp_path / "one", *fixed), run(tmp_path / "other", *fixed, *asked)
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["fingerprint"] == other["fingerprint"]
