"""Activation checkpointing, compiling and channels last change where numbers are kept, never the numbers.

A recomputed or compiled block that draws another mask or begins with changed buffers, of a cut model too, a result that
is kept although it was overwritten, and a convnet whose weights fall back to contiguous are caught here alone.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.running import run
from tests.contract.stepping import Case, oracle, run_rank, train
from tests.support import reference, zoo
from tests.support.counting import Counting, StepTrace
from tests.support.pool import Member, Pool
from tests.support.present import present
from trainkit.errors import ConfigError, TrainkitError
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.models.resnet import ResNet
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.strategies.base import PlanContext
from trainkit.strategies.core.graphs import shards
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.mesh.strategy import Fsdp, TensorParallel
from trainkit.strategies.model_transforms import (
    GraphSettings,
    ModelTransforms,
    apply_transforms,
    format_for,
    shaping_notes,
    shaping_problems,
)
from trainkit.strategies.model_transforms.compiling import Compiled, is_compiled
from trainkit.strategies.model_transforms.recomputing import selective_contexts

pytestmark = pytest.mark.pairwise

EAGERLY: dict[str, Any] = {"compile_mode": "default", "backend": "aot_eager"}
FULL, SELECTIVE = ModelTransforms(recompute="full"), ModelTransforms(recompute="selective")
COMPILED, LAST = ModelTransforms(**EAGERLY), ModelTransforms(memory_format="channels_last")


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
    (expected, names), (actual, other_names) = two_shards(ModelTransforms()), two_shards(shaping, compiles)
    assert names == other_names
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


class Nested(nn.Module):
    """A block with blocks inside, which are keyed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def test_blocks_inside_a_recomputed_one_draw_the_masks_of_their_shard() -> None:
    results = []
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
        results.append([*outputs, *(param.grad for param in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def saved_bytes(shaping: ModelTransforms) -> int:
    """Bytes that autograd saves for backward, parameters excluded."""
    model = apply_transforms(gpt(), shaping)
    param_pointers, sizes = {param.untyped_storage().data_ptr() for param in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in param_pointers:
            sizes[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)  # so that no two of them have one address
        return tensor

    tensors: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(TOKENS)
    return sum(sizes.values())


def test_recomputing_keeps_the_inputs_of_blocks_alone() -> None:
    none, full, half = (saved_bytes(ModelTransforms(recompute=recompute)) for recompute in ("none", "full", 2))
    block = 2 * 8 * 8 * 4  # samples x length x width of float32
    assert full < half < none
    assert none - full > 3 * 10 * block  # what each of three blocks makes is ten times its input and more


@pytest.mark.slow
def test_a_recomputation_leaves_batch_statistics_as_it_found_them() -> None:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    states = []
    for shaping in (ModelTransforms(), FULL, SELECTIVE):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = apply_transforms(ResNet(depth=18, num_classes=3), shaping)
        for _ in range(2):
            model(images).sum().backward()
        states.append({**dict(model.named_buffers()), **{name: p.grad for name, p in model.named_parameters()}})
    for name, tensor in states[0].items():
        assert all(torch.equal(present(tensor), present(state[name])) for state in states)
    assert {int(present(tensor)) for name, tensor in states[1].items() if name.endswith("num_batches_tracked")} == {2}


class CountingBuffer(nn.Module):
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
    inner = CountingBuffer()
    model = apply_transforms(nn.Sequential(inner), FULL)
    with torch.no_grad():
        inner.linear.weight.fill_(0.5)
        inner.linear.bias.zero_()
    inputs = torch.ones(1, 2, requires_grad=True)
    first, second = model(inputs), model(inputs)
    assert float(second.detach().sum() / first.detach().sum()) == 2.0
    (second_grad,) = torch.autograd.grad(second.sum(), inputs)
    (first_grad,) = torch.autograd.grad(first.sum(), inputs)
    assert torch.equal(second_grad, 2 * first_grad)
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
        duplicate = copy.deepcopy(model)
        next(model.parameters()).zero_()
        assert torch.equal(duplicate(TOKENS), expected)


def mlp() -> nn.Module:
    return Mlp(in_features=2, hidden=[2], out_features=2)


STEP = {"compile_mode": "step"}
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
    (gpt, replace(SELECTIVE, **EAGERLY), "model", "activation_checkpointing=selective", "block keeps. Use full."),
    (gpt, replace(FULL, **EAGERLY | STEP), "model", "compile.mode=step", "graph chooses the tensors that it keeps"),
    (mlp, ModelTransforms(cuda_graphs=True), "model", "compile.cuda_graphs=true", "compile.mode=off compiles none."),
    (mlp, LAST, "model", "memory_format=channels_last", "no effect: the model has no nn.Conv2d. Leave it out."),
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
    assert str(problem).startswith("compile.mode=default: needs a C++ compiler, and there is none here. Install one")


def test_max_autotune_uses_no_cuda_graphs() -> None:
    model = apply_transforms(gpt(), ModelTransforms(compile_mode="max-autotune"), compiles="model")
    modes = {module.forward.mode for module in model.modules() if isinstance(module.forward, Compiled)}
    assert modes == {"max-autotune-no-cudagraphs"}
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert options["max_autotune"]
    assert not options.get("triton.cudagraphs")


def test_a_note_of_a_compiled_model_with_dropout_states_that_its_masks_differ() -> None:
    compiled = ModelTransforms(compile_mode="default")
    (note,) = shaping_notes(gpt(dropout=0.1), compiled)
    assert note.startswith("compile.mode: random numbers of the model differ from those of an eager run")
    assert shaping_notes(zoo.Net(), compiled) == shaping_notes(gpt(dropout=0.1), COMPILED) == ()


@pytest.mark.slow
def test_a_run_with_both_ends_in_the_bits_of_one_with_neither(tmp_path: Any) -> None:
    fixed = (
        "recipe=null", "model=gpt", "model.vocab_size=32", "model.context=8", "model.num_layers=2", "model.num_heads=2",
        "model.width=8", "model.dropout=0.2", "data=synthetic_tokens", "data.vocab_size=32", "data.context=8",
        "objective=language_modelling", "batch.global_size=16", "batch.micro_size=8", "steps=3",
    )  # fmt: skip
    both = ("activation_checkpointing=full", "compile.mode=default", "compile.backend=aot_eager")
    plain, transformed = run(tmp_path / "one", *fixed), run(tmp_path / "other", *fixed, *both)
    assert plain["weights_sha256"] == transformed["weights_sha256"]
    assert plain["fingerprint"] == transformed["fingerprint"]


GPT = Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3)
RESNET = Case(task="resnet", global_size=8, micro_size=4, num_steps=3, rate_scale=0.1)
BOTH = ModelTransforms(recompute="full", **EAGERLY)
SPREAD: dict[str, dict[str, Any]] = {
    "one_device": {},
    "mirrored": {"replicas": 2},
    "device_map": {"map": {"embed": "cpu", "rest": "/cpu:0"}},
    "fsdp": {"replicas": 2},
    "pipeline": {"stages": 2},
    "tensor_parallel": {"degree": 2},
}


@pytest.mark.parametrize("strategy", SPREAD)
def test_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    assert_reference(train(pool, case), case)


def graphs_of_a_rank(member: Member | None, case: Case) -> tuple[int, dict[str, Tensor]]:
    """How many graphs a rank has compiled, and the weights that it ends with."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    weights = run_rank(member, case).weights
    return counters["stats"]["unique_graphs"] - before, weights


def compiled(pool: Pool, case: Case) -> list[dict[str, Tensor]]:
    """The weights of each rank, which has compiled something."""
    count = len(case.make_strategy().tasks(PlanContext()))
    task = "tests.contract.test_shaping.graphs_of_a_rank"
    ranks = [graphs_of_a_rank(None, case)] if count == 1 else pool.run(task, case, num_ranks=count)
    assert min(graphs for graphs, _ in ranks) > 0
    return [weights for _, weights in ranks]


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.long
def test_compiled_and_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=BOTH)
    for weights in compiled(pool, case):
        assert reference.differences(weights, oracle(case)) == []


@pytest.mark.long
def test_compiled_layers_that_are_cut_draw_the_masks_of_eager_ones(pool: Pool) -> None:
    settings = {"degree": 2, "replicas": 2}
    case = replace(GPT, strategy="tensor_parallel", settings=settings, model={"dropout": 0.3})
    for eager, weights in zip(train(pool, case), compiled(pool, replace(case, shaping=COMPILED)), strict=True):
        torch.testing.assert_close(weights, eager.weights, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.slow
def test_a_block_recomputed_after_others_were_computed_draws_its_own_masks(schedule: str, pool: Pool) -> None:
    base = replace(GPT, model={"dropout": 0.3})
    case = replace(base, strategy="pipeline", settings={"stages": 2, "schedule": schedule}, shaping=FULL)
    assert_close(train(pool, case), alone(base), rtol=1e-10)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_batch_statistics_count_each_shard_once(strategy: str, pool: Pool) -> None:
    case = replace(RESNET, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    assert_close(train(pool, case), alone(RESNET), rtol=1e-9, atol=1e-12)


def alive_after_forward(shaping: ModelTransforms) -> int:
    model = apply_transforms(gpt(), shaping)
    with Counting() as counting:
        outputs = model(TOKENS)
        gc.collect()
        num_bytes = counting.bytes
    del outputs
    return num_bytes


@pytest.mark.slow
def test_selective_keeps_less_than_none_and_more_than_full() -> None:
    none, selective, full = (
        alive_after_forward(ModelTransforms(recompute=policy)) for policy in ("none", "selective", "full")
    )
    assert full < selective < none
    assert none - selective > 3 * 5 * 2 * 8 * 8 * 4  # of each of three blocks: norms, activations and their kin


class Bending(nn.Module):
    """Changes the result of a matrix product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        bent: Tensor = self.linear(inputs).mul_(3).sigmoid()
        return bent


def gradients(block: nn.Module, *, autocast: bool = False, apart: bool = False, selective: bool = True) -> list[Tensor]:
    """Of a block that is applied twice, by one backward pass or by two: for the inputs, and for the weights."""
    inputs = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    hidden, params = inputs, list(block.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            hidden = (
                checkpoint(block, hidden, use_reentrant=False, context_fn=selective_contexts)
                if selective
                else block(hidden)
            )
    total = hidden.sum()
    if apart:
        return [*torch.autograd.grad(total, inputs, retain_graph=True), *torch.autograd.grad(total, params)]
    return list(torch.autograd.grad(total, [inputs, *params]))


@pytest.mark.parametrize("settings", [{}, {"autocast": True}, {"apart": True}], ids=["once", "autocast", "apart"])
@pytest.mark.parametrize("make", [Bending, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])
def test_in_place_changes_cached_casts_and_split_backward_passes_keep_the_bits(
    make: Callable[[], nn.Module], settings: dict[str, bool]
) -> None:
    block = make()
    expected, actual = gradients(block, **settings, selective=False), gradients(block, **settings)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


def test_a_kept_result_is_not_computed_again() -> None:
    block, counts = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), []
    for contexts in (noop_context_fn, selective_contexts):
        with StepTrace() as trace:
            out = checkpoint(block, torch.ones(1, 4, requires_grad=True), use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        counts.append(trace.total.names["addmm"])
    assert counts == [4, 2]


class Fickle(nn.Module):
    """Multiplies by another operation when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.eye(4)), [0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls[0] += 1
        product = inputs @ self.weight if self.calls[0] == 1 else torch.addmm(torch.zeros(4), inputs, self.weight)
        return product.tanh()


def test_a_block_that_multiplies_otherwise_the_second_time_is_an_error() -> None:
    inputs = torch.ones(1, 4, requires_grad=True)
    output = checkpoint(Fickle(), inputs, use_reentrant=False, context_fn=selective_contexts)
    with pytest.raises(TrainkitError, match="different matrix products when it is recomputed"):
        output.sum().backward()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "one_device"},
        {"strategy": "mirrored", "settings": {"replicas": 2}},
        {"strategy": "fsdp", "settings": {"replicas": 2}},
        pytest.param({"strategy": "pipeline", "settings": {"stages": 2, "schedule": "zero_bubble"}},
                     marks=pytest.mark.slow),
        pytest.param({"strategy": "tensor_parallel", "settings": {"degree": 2}}, marks=pytest.mark.slow),
    ],
    ids=["one_device", "mirrored", "fsdp", "zero_bubble", "tensor_parallel"],
)  # fmt: skip
def test_weights_have_the_bits_of_a_training_that_keeps_all(settings: dict[str, Any], pool: Pool) -> None:
    case = replace(Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3), **settings)
    plain, spared = train(pool, case), train(pool, replace(case, shaping=SELECTIVE))
    for expected, rank in zip(plain, spared, strict=True):
        assert all(torch.equal(tensor, rank.weights[name]) for name, tensor in expected.weights.items())


CONVNET = Case(task="resnet", global_size=8, micro_size=4, num_steps=4, shaping=LAST)


@pytest.mark.parametrize(
    "strategy", ["one_device", "mirrored", "mesh", "pipeline", pytest.param("central_storage", marks=pytest.mark.long)]
)
def test_steps_are_those_of_the_contiguous_reference(strategy: str, pool: Pool) -> None:
    case = replace(CONVNET, strategy=strategy, settings={"replicate": 2, "shard": 1} if strategy == "mesh" else {})
    assert_reference(train(pool, replace(case, resume_at=2)), case)


def test_weights_and_features_have_their_channels_last() -> None:
    model = apply_transforms(zoo.small_resnet(), LAST)
    features: list[torch.Tensor] = []
    blocks = model.get_submodule("blocks")
    blocks.register_forward_hook(lambda _module, _inputs, output: features.append(output))
    model(torch.ones(2, 3, 16, 16))
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in [*weights, *features])


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


def test_auto_leaves_a_model_without_convolutions_alone() -> None:
    model = nn.Linear(2, 2)
    assert shaping_notes(model, ModelTransforms(memory_format="auto")) == ()
    assert shaping_problems(model, ModelTransforms(memory_format="auto"), compiles="model", strategy="") == []


def test_a_note_names_the_memory_format_that_auto_chose() -> None:
    (note,) = shaping_notes(zoo.small_resnet(), ModelTransforms(memory_format="auto"))
    assert note.startswith("memory_format: channels_last (auto: convolutions in 16 bits on CUDA). Results differ from")


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
