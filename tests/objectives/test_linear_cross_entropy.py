"""A chunk of scores that is lost, counted twice or rounded too early is caught here alone.

A loss that is computed in an output layer although a hook or the model changes its scores is caught here alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.present import present
from tests.support.scores import ScoreBytes
from trainkit import api
from trainkit.errors import ConfigError, TrainingError
from trainkit.models.gpt import Gpt
from trainkit.numerics.precision import Precision
from trainkit.objectives import linear_cross_entropy as chunked
from trainkit.objectives.base import Loss
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.linear_cross_entropy import score_rows
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.run.estimates.memory import device_memory
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms
from trainkit.trained.build import meta_model

ROWS, FEATURES, WORDS = 37, 6, 29

linear_cross_entropy = partial(chunked.linear_cross_entropy, few=0)


def made(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which every fifth does not count."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for shape in ((ROWS, FEATURES), (WORDS, FEATURES), (WORDS,))
    )
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight, bias)
    scores = scores if scores.dtype is torch.float64 else scores.float()
    return functional.cross_entropy(scores, targets, reduction="sum")


def grads(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 0.37, tensors)


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
@pytest.mark.parametrize("size", [1, 8 * WORDS * 10], ids=["least", "ten rows"])
def test_the_loss_and_its_gradients_are_those_of_all_scores(
    size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", size)
    hidden, weight, bias, targets = made(scale=scale)

    found = linear_cross_entropy(hidden, weight, targets, bias=bias)
    expected = plain(hidden, weight, bias, targets)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(grads(found, hidden, weight, bias), grads(expected, hidden, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
def test_in_bfloat16_gradients_are_as_exact_as_those_of_all_scores(scale: float) -> None:
    hidden, weight, bias, targets = made(torch.bfloat16, scale=scale)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = grads(plain(exact[0], exact[1], exact[2], targets), *exact)

    found = grads(linear_cross_entropy(hidden, weight, targets, bias=bias), hidden, weight, bias)
    before = grads(plain(hidden, weight, bias, targets), hidden, weight, bias)

    for one, other, true in zip(found, before, wanted, strict=True):
        assert (one - true).norm() <= 1.2 * (other - true).norm()


def test_a_nearly_certain_target_keeps_its_small_gradient_in_bfloat16() -> None:
    # 1 - 2**-9 is 1 in bfloat16: what remains is counted from the others
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    losses, gradient = score_rows(scores, torch.tensor([0]))

    expected = functional.cross_entropy(scores.double(), torch.tensor([0]))
    assert float(losses) == pytest.approx(float(expected), rel=4e-3)
    assert float(-gradient[0, 0]) == pytest.approx(float(1 - scores.double().softmax(1)[0, 0]), rel=1e-2)


def test_a_target_whose_probability_underflows_has_a_finite_loss() -> None:
    scores = torch.tensor([[0.0, 200.0, 199.0]])
    losses, gradient = score_rows(scores, torch.tensor([0]))

    torch.testing.assert_close(losses, functional.cross_entropy(scores, torch.tensor([0]), reduction="none"))
    assert float(gradient[0, 0]) == -1


def test_a_frozen_layer_costs_no_gradient_and_targets_alone_that_do_not_count_give_zero() -> None:
    hidden, weight, _, targets = made()
    frozen = weight.detach()

    loss = linear_cross_entropy(hidden, frozen, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        hidden.grad, *torch.autograd.grad(plain(hidden, frozen, None, targets), hidden), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()  # type: ignore[no-untyped-call]

    nothing = linear_cross_entropy(hidden, weight, torch.full((ROWS,), -100))
    assert float(nothing.detach()) == float(grads(nothing, weight)[0].abs().max()) == 0


def bytes_a_score(compute: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """(bytes moved, most bytes alive) of tensors as large as the scores of a chunk, by the number of scores."""
    rows, words, features = 256, 1024, 16
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 2 * words * 64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, features, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(words, features, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(words, (rows,), generator=generator)
    with ScoreBytes(at_least=64 * words) as counted:
        compute(hidden, weight, targets).backward()
    return counted.moved / (rows * words), counted.peak / (rows * words)


def test_in_bfloat16_fourteen_bytes_a_score_are_moved_and_one_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, alive = bytes_a_score(linear_cross_entropy, monkeypatch)

    assert moved <= 14  # written, read thrice; its gradient written, read for the target, and by two products
    assert alive <= 1  # two tensors of a chunk, a quarter of the rows

    moved, alive = bytes_a_score(lambda hidden, weight, targets: plain(hidden, weight, None, targets), monkeypatch)
    assert moved > 40
    assert alive >= 10


TOKENS = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])
INSIDE, PLAIN = LanguageModelling(), LanguageModelling(cross_entropy="plain")


def gpt(**settings: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**{"vocab_size": 32, "context": 8, "num_layers": 1, "num_heads": 2, "width": 8, **settings})


def grads_of(objective: Any, model: nn.Module, batch: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = objective.loss(model, batch).loss_sum
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_few_scores_give_the_bits_of_the_plain_loss(precision: Any) -> None:
    numbers = Precision(value=precision)
    model = numbers.adapt(gpt(bias=True))
    with numbers.autocast(["cpu"]):
        assert INSIDE.loss(model, BATCH).outputs is None
        torch.testing.assert_close(grads_of(INSIDE, model, BATCH), grads_of(PLAIN, model, BATCH), rtol=0, atol=0)


class Adapter(nn.Module):
    """A small change of a frozen layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.change = inner, nn.Linear(inner.in_features, inner.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        """The sum of both."""
        scores: Tensor = self.inner(hidden) + self.change(hidden)
        return scores


def adapted(model: Gpt) -> None:
    model.head.output = Adapter(model.head.output)  # type: ignore[assignment]


def hooked(model: Gpt) -> None:
    model.head.register_forward_hook(lambda _module, _args, scores: scores * 2)


def recomputed(model: Gpt) -> None:
    apply_transforms(model, ModelTransforms(recompute=["_Head"]))


@pytest.mark.parametrize(("change", "reason"), [
    (adapted, "its output layer is a Adapter"), (hooked, "_Head has a hook that may read scores"),
    (recomputed, "_Head, which holds its output layer, has another forward"),
])  # fmt: skip
def test_a_layer_that_is_not_plain_keeps_its_scores_and_the_summary_says_why(
    change: Callable[[Gpt], None], reason: str
) -> None:
    model = gpt()
    change(model)
    assert INSIDE.loss(model, BATCH).outputs is not None
    assert INSIDE.notes(model, BATCH) == [f"the loss is computed from all scores: {reason}."]
    torch.testing.assert_close(grads_of(INSIDE, model, BATCH), grads_of(PLAIN, model, BATCH), rtol=0, atol=0)


def test_a_hook_that_comes_later_is_called_with_scores_and_its_removal_gives_the_loss_back() -> None:
    model, seen = gpt(), []

    def see(_module: object, _args: object, scores: object) -> None:
        seen.append(type(scores))

    for register in (model.head.register_forward_hook, nn.modules.module.register_module_forward_hook):
        assert INSIDE.loss(model, BATCH).outputs is None
        handle = register(see)
        INSIDE.loss(model, BATCH)
        handle.remove()
        assert set(seen) == {torch.Tensor}
        seen.clear()


class Doubled(LanguageModelling):
    """A loss of one's own, of scores."""

    draws_nothing: ClassVar[bool] = True

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Twice the other."""
        loss = super().score(outputs, targets)
        loss.loss_sum = loss.loss_sum * 2
        return loss


def test_evaluation_float16_and_an_objective_that_replaces_score_alone_are_given_scores() -> None:
    model = gpt()
    assert Doubled().loss(model, BATCH).outputs is not None
    with torch.no_grad():
        assert INSIDE.loss(model, BATCH).outputs is not None
    with Precision(value="fp16_mixed").autocast(["cpu"]):
        assert INSIDE.loss(model, BATCH).outputs is not None
    assert INSIDE.loss(model.eval(), BATCH).outputs is not None


def test_a_model_that_loses_the_loss_of_its_layer_is_named() -> None:
    class Loses(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            super().forward(tokens)
            return torch.zeros(3, 8, 32)

    model = gpt()
    model.__class__ = Loses
    with pytest.raises(TrainingError, match=r"contain the result of its output_layer\(\) 0 times"):
        INSIDE.loss(model, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPTJ", "Gemma2"])
def test_a_causal_model_of_transformers_is_scored_inside_unless_it_changes_its_scores(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # slow: only this test pays for it

    monkeypatch.setitem(chunked.linear_cross_entropy.__kwdefaults__ or {}, "few", 0)
    sizes = {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8, "tie_word_embeddings": family != "GPTJ"}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rotary_dim": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **more, **none)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    labels = TOKENS.masked_fill(TOKENS < 6, -100)
    batch = {"input_ids": TOKENS, "labels": labels}

    for objective, given in ((ModelComputesLoss(shifted=True), batch), (INSIDE, (TOKENS, labels))):
        plain = type(objective)(**{**vars(objective), "cross_entropy": "plain"})
        assert (objective.loss(model, given).outputs is None) == (family != "Gemma2")
        assert objective.loss(model, given).weight == plain.loss(model, given).weight
        torch.testing.assert_close(
            grads_of(objective, model, given), grads_of(plain, model, given), rtol=1e-4, atol=1e-5
        )
    changed = "the loss is computed from all scores: Gemma2ForCausalLM changes the output of its output layer."
    assert INSIDE.notes(model, (TOKENS, TOKENS)) == ([changed] if family == "Gemma2" else [])


@pytest.mark.slow
def test_the_planned_peak_does_not_hold_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    words, rows = 8192, 4 * 64
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * words * 16)
    keys = [
        "recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling", "batch.global_size=4",
        f"model.vocab_size={words}", f"data.vocab_size={words}", "model.context=64", "data.context=64",
        "model.width=16", "model.num_layers=1",
    ]  # fmt: skip

    def peak(chosen: str) -> int:
        plan = make_plan(api.compose([*keys, f"objective.cross_entropy={chosen}"]).cfg)
        return present(device_memory(plan, meta_model(plan.cfg), evaluates=False).activations)

    assert peak("plain") > 2 * 4 * rows * words
    assert peak("auto") < 4 * rows * words / 2


def test_the_kernel_of_liger_gets_the_hidden_states_and_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    liger, model, calls = LanguageModelling(cross_entropy="liger"), gpt(), []

    def fused(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        calls.append(settings)
        return chunked.linear_cross_entropy(hidden, weight, targets, bias=bias)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = ((None, model, "needs Liger Kernel"), (SimpleNamespace(), model, "runs on GPUs, and there is none here"),
               (SimpleNamespace(), nn.Linear(2, 2), "Linear has no output_layer()"))  # fmt: skip
    for installed, given, word in refused:
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, found=installed: found)
        (problem,) = liger.validate_model(given, BATCH)
        assert word in str(problem)

    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    torch.testing.assert_close(grads_of(liger, model, BATCH), grads_of(PLAIN, model, BATCH))
    assert calls == [{"ignore_index": -100, "reduction": "sum", "accum_dtype": torch.float32}]
    with pytest.raises(ConfigError, match="not used where the loss is computed from scores"):
        liger.loss(model.eval(), BATCH)
