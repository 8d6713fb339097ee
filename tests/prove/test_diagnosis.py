"""A wrong mean, sum, clip or decay that `prove` explains by another cause, or a loosened tolerance, is caught here."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.present import present
from tests.support.second_device import Remote, SecondDevice
from trainkit import api
from trainkit.config.schema import RunConfig
from trainkit.config.sections import ClipConfig
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.prove import examining as faults
from trainkit.prove.comparing import compare, is_rounding, moved_by_rounding
from trainkit.prove.examining import (
    Cause,
    Difference,
    Examiner,
    Hypothesis,
    Matching,
    PlainLoop,
    Probed,
    Replay,
    Shard,
    StepEvidence,
    add_up,
    clipped,
    combine,
    differing_gradients,
    explain_probe,
    explain_updates,
)
from trainkit.run.planning.notes import probe

NAMES = ("w", "b")


def wave(shape: tuple[int, ...], phase: float) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * (1.3 + phase)).reshape(shape)


def shard(number: int, *, weight: float, replica: int, phase: float = 0.0) -> Shard:
    gradient = {"w": wave((3, 4), number + phase) * weight, "b": wave((3,), 5.0 + number + phase) * weight}
    buffers = {"mean": wave((4,), 0.2 * number), "count": torch.tensor(8)}
    return Shard(gradient=gradient, weight=weight, size=int(weight) + 1, replica=replica, buffers=buffers)


def step(number: int = 0) -> StepEvidence:
    """Three shards of 4, 3 and 2 targets, of which replica 0 computes the first and the last."""
    weights = {0: 4.0, 1: 3.0, 2: 2.0}
    shards = tuple(shard(index + number, weight=weight, replica=index % 2) for index, weight in weights.items())
    redrawn = tuple(shard(index, weight=weight, replica=index % 2, phase=0.7) for index, weight in weights.items())
    return StepEvidence(
        step=number,
        shards=shards,
        num_replicas=2,
        buffers={"mean": torch.zeros(4, dtype=torch.float64), "count": torch.tensor(7)},
        strides={"w": (1, 3), "b": (1,)},
        drawn_alike=lambda: redrawn,
    )


def causes_of(actual: dict[str, Tensor], hypotheses: Iterable[Hypothesis], expected: dict[str, Tensor]) -> list[Cause]:
    matching = Matching()
    matching.add(Difference(step=0, actual=actual, expected=expected, allowed=dict.fromkeys(actual, 1e-12)), hypotheses)
    return [*matching.matches]


WRONG_GRADIENTS: dict[str, tuple[Cause, Callable[[StepEvidence], dict[str, Tensor]]]] = {
    "mean of shard means": (faults.MEAN_OF_MEANS, lambda s: combine(s.shards, [1 / (3 * w.weight) for w in s.shards])),
    "mean of replica means": (faults.MEAN_OF_MEANS, lambda s: combine(s.shards, [1 / 12, 1 / 6, 1 / 12])),
    "not reduced": (faults.NOT_REDUCED, lambda s: combine(s.shards, [1 / 9, 0, 1 / 9])),
    "summed twice": (faults.COUNTED_TWICE, lambda s: {"b": s.gradient["b"] * 2}),
    "averaged over replicas": (faults.AVERAGED, lambda s: {name: s.gradient[name] / 2 for name in NAMES}),
    "read as contiguous": (faults.LAYOUT, lambda s: {"w": faults.read_as_contiguous(s.gradient["w"], (1, 3))}),
    "drawn alike": (faults.DRAWN_ALIKE, lambda s: combine(present(s.drawn_alike)(), [1 / 9] * 3)),
}


@pytest.mark.parametrize("fault", WRONG_GRADIENTS)
def test_a_wrong_gradient_has_one_cause(fault: str) -> None:
    cause, wrong = WRONG_GRADIENTS[fault]
    evidence = step()
    assert causes_of(wrong(evidence), faults.gradient_hypotheses(evidence), dict(evidence.gradient)) == [cause]


def test_a_gradient_that_no_fault_gives_is_not_explained_and_a_doubled_update_has_two_causes() -> None:
    evidence = step()
    odd, doubled = ({name: evidence.gradient[name] * factor for name in NAMES} for factor in (1.01, 2))
    assert causes_of(odd, faults.gradient_hypotheses(evidence), dict(evidence.gradient)) == []
    hypotheses = faults.gradient_hypotheses(evidence, rate_is_apart=False)
    assert causes_of(doubled, hypotheses, dict(evidence.gradient)) == [faults.COUNTED_TWICE, faults.RATE]


def causes_in(*steps: dict[str, Tensor]) -> list[Cause]:
    """The causes of several steps, of which each is compared with its right gradient."""
    matching = Matching()
    for number, grads in enumerate(steps):
        evidence = step(number)
        wrong = Difference(step=number, actual=grads, expected=evidence.gradient, allowed=dict.fromkeys(grads, 1e-12))
        matching.add(wrong, faults.gradient_hypotheses(evidence))
    return [*matching.matches]


def test_a_cause_must_give_what_differs_in_every_step_and_drift_is_explained_by_the_first() -> None:
    assert causes_in({"w": step(0).gradient["w"] * 2.0}, {"w": step(1).gradient["w"] / 3.0}) == []  # each known alone
    first, second = combine(step(0).shards, [1 / 9, 0, 1 / 9]), combine(step(1).shards, [0.1, 0.2, 0.3])
    assert causes_in(first, second) == [faults.NOT_REDUCED]


WRONG_BUFFERS: dict[str, tuple[Cause, Callable[[StepEvidence], dict[str, Tensor]]]] = {
    "averaged alike": (
        faults.BUFFERS_UNWEIGHTED,
        lambda s: {"mean": sum((shard.buffers["mean"] for shard in s.shards), torch.zeros(4)) / 3},
    ),
    "rank 0": (
        faults.BUFFERS_OF_ONE,
        lambda s: {"mean": (5 * s.shards[0].buffers["mean"] + 3 * s.shards[2].buffers["mean"]) / 8},
    ),
}


@pytest.mark.parametrize("fault", WRONG_BUFFERS)
def test_wrong_buffers_have_one_cause(fault: str) -> None:
    cause, wrong = WRONG_BUFFERS[fault]
    evidence = step()
    expected = dict(add_up(evidence.shards, evidence.buffers).buffers)
    assert int(expected["count"]) == 8
    assert causes_of(wrong(evidence), faults.buffer_hypotheses(evidence), expected) == [cause]


def replay() -> Replay:
    model = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(wave((3, 4), 0.4))
        model.bias.copy_(wave((3,), 0.6))
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.2, "fused": True}
    params = dict(model.named_parameters())
    state = {f"optimizer/{slot}/{name}": wave(tuple(param.shape), 2.0).abs() * 0.1 for name, param in params.items()
             for slot in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    state |= {f"optimizer/step/{name}": torch.tensor(3.0) for name in params}
    cfg = RunConfig(optimizer=optimizer, clip=ClipConfig(max_norm=0.3))
    return Replay(cfg=cfg, model=model, params=params, state=state, factor=0.5)


def linear_step() -> StepEvidence:
    """The same evidence under the names of a linear layer, whose weight is stored by columns."""
    old = step()
    shards = tuple(
        Shard(gradient={"weight": s.gradient["w"], "bias": s.gradient["b"]}, weight=s.weight, size=s.size,
              replica=s.replica) for s in old.shards
    )  # fmt: skip
    return StepEvidence(step=0, shards=shards, num_replicas=2, strides={"weight": (1, 3), "bias": (1,)})


WRONG_UPDATES: dict[str, tuple[Cause, Callable[[StepEvidence, Replay], Mapping[str, Tensor]]]] = {
    "rate by replicas": (faults.RATE, lambda s, r: r.step(clipped(s.gradient, 0.3), rate=2.0)),
    "decay by shards": (faults.DECAY_PER_SHARD, lambda s, r: r.step(clipped(s.gradient, 0.3), decay=3.0)),
    "no decay": (faults.NOT_DECAYED, lambda s, r: r.step(clipped(s.gradient, 0.3), decay=0.0)),
    "no clip": (faults.NOT_CLIPPED, lambda s, r: r.step(s.gradient)),
    "state lost": (faults.STATE_LOST, lambda s, r: r.step(clipped(s.gradient, 0.3), forgets=True)),
    "clipped before reducing": (
        faults.CLIPPED_APART,
        lambda s, r: r.step(combine(
            [Shard(gradient=clipped(combine(s.shards, shares), 0.3), weight=1, size=1)
             for shares in ([1 / 9, 0, 1 / 9], [0, 1 / 9, 0])], [1, 1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_UPDATES)
def test_a_wrong_update_has_one_cause(fault: str) -> None:
    cause, wrong = WRONG_UPDATES[fault]
    evidence, again = linear_step(), replay()
    right = dict(again.step(clipped(evidence.gradient, 0.3)))
    assert causes_of(dict(wrong(evidence, again)), faults.update_hypotheses(evidence, again), right) == [cause]


def test_a_replayed_step_has_the_bits_of_torch_and_leaves_the_checkpoint_as_it_was() -> None:
    evidence, again = linear_step(), replay()
    first, second = again.step(evidence.gradient), again.step(evidence.gradient)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(again.state["optimizer/step/weight"]) == 3.0


def test_what_is_compared_with_checkpoints_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = PlainLoop.shards

    def on_second_device(loop: PlainLoop, step: int) -> Iterator[Shard]:
        for shard in shards(loop, step):
            yield replace(shard, gradient={name: Remote(grad) for name, grad in shard.gradient.items()})

    monkeypatch.setattr(PlainLoop, "shards", on_second_device)
    with SecondDevice():
        examiner = Examiner(api.compose(["recipe=digits", "steps=2"]).cfg)
    masks = examiner.elements_without_gradient  # some pixels of the digits are always 0
    assert {name: mask.device.type for name, mask in masks.items()}["layers.0.weight"] == "cpu"


def test_a_gradient_is_compared_within_the_rounding_of_its_terms() -> None:
    """Two shards that cancel: their rounding is large beside the sum, and no difference."""
    shards = [Shard(gradient={"w": torch.ones(2) * value}, weight=1.0, size=1) for value in (1.0, -1.0 + 1e-6)]
    expected = add_up(shards, {})
    for error, differs in ((1e-7, False), (1e-2, True)):
        actual = {"w": expected.gradient["w"] + error}
        wrong = differing_gradients(0, expected, actual, errors={}, read_from=None, rate=1.0)
        assert (wrong is not None) == differs
    assert gradients_differ({"w": torch.tensor([float("nan")]), "b": torch.zeros(1)}), "no number"


def probed(factors: dict[str, float]) -> Probed:
    evidence, result = step(), Probed()
    wrong = {name: evidence.gradient[name] * factor for name, factor in factors.items()}
    difference = Difference(step=0, actual=wrong, expected=evidence.gradient, allowed=dict.fromkeys(wrong, 1e-12))
    result.gradients.add(difference, faults.gradient_hypotheses(evidence))
    return result


def test_an_answer_names_the_rule_the_tensor_and_the_page_or_what_was_ruled_out() -> None:
    (line,) = explain_probe(probed({"b": 2.0}))
    assert line == (
        "explained by: rule 3 (gradient): the sum of the gradients, added up again; "
        "gradient/b of step 1 fits this to 0 (2 times) (docs/numbers.md#3-gradient)"
    )
    first, second = explain_probe(probed({"b": 1.7}))
    assert first.startswith("not explained: ")
    assert second.startswith("  the mean of the shards' means; the gradient of one replica, not added ")
    (line,) = explain_updates(Matching())
    assert line.startswith("not explained: every gradient, and every step taken alone from the candidate's own ")


def test_all_causes_with_the_same_numbers_are_named() -> None:
    evidence, result = step(), Probed()
    wrong = {"b": evidence.gradient["b"] * 2}
    difference = Difference(step=0, actual=wrong, expected=evidence.gradient, allowed={"b": 1e-12})
    result.gradients.add(difference, faults.gradient_hypotheses(evidence, rate_is_apart=False))
    lines = list(explain_probe(result))
    assert lines[0] == "explained by one of these, which the numbers cannot distinguish:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  rule 3 (gradient)", "  rule 6 (learning rate)"]


HALF_AND_TWICE = pytest.mark.parametrize(("times", "differs"), [(0.5, False), (2.0, True)])


@HALF_AND_TWICE
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2.0**-11), (torch.float64, 2.0**-40)])
def test_weights_differ_by_4096_units_of_their_norm(
    times: float, differs: bool, dtype: torch.dtype, bound: float
) -> None:
    expected = {1: {"param/w": torch.tensor([1.0], dtype=dtype)}}
    actual = {1: {"param/w": torch.tensor([1.0 + times * bound], dtype=dtype)}}
    (weight,) = compare(expected, actual)
    assert (weight.verdict, is_rounding(expected, actual)) == (("different", False) if differs else ("rounding", True))
    (weight,) = compare(expected, actual, exact=True)
    assert weight.verdict == "different"
    (weight,) = compare(expected, {1: {"param/w": expected[1]["param/w"] * math.nan}})
    assert weight.verdict == "different"


@HALF_AND_TWICE
def test_a_weight_without_gradient_may_move_by_1e_8_of_the_rates(times: float, differs: bool) -> None:
    expected = {1: {"param/w": torch.full((1,), 1e-6)}}
    actual = {1: {"param/w": torch.full((1,), 1e-6 + times * 3e-8)}}
    allowed = moved_by_rounding([1.0, 2.0])
    (weight,) = compare(expected, actual, no_gradient=frozenset({"param/w"}), allowed=allowed)
    assert weight.verdict == ("different" if differs else "rounding")


def gradients_differ(
    grads: dict[str, Tensor], *, read_from: dict[str, Tensor] | None = None, rate: float = 1.0
) -> bool:
    """Whether gradients differ from one of 1 for w and of 0 for b."""
    right = {"w": torch.ones_like(grads["w"]), "b": torch.zeros_like(grads["b"])}
    expected = add_up([Shard(gradient=right, weight=1.0, size=1)], {})
    return differing_gradients(0, expected, grads, errors={}, read_from=read_from, rate=rate) is not None


@HALF_AND_TWICE
def test_a_gradient_differs_by_units_of_its_terms_of_all_or_over_the_rate(times: float, differs: bool) -> None:
    ones = torch.ones(1, dtype=torch.float64)
    assert gradients_differ({"w": torch.tensor([1 + times * 2.0**-11]), "b": torch.zeros(1)}) == differs
    assert gradients_differ({"w": ones, "b": ones * times * 1e-12}) == differs
    params = {"param/w": torch.ones(1), "param/b": torch.zeros(1)}
    grads = {"w": torch.tensor([1.0 + times * (0.5 + 2.0**-11)]), "b": torch.zeros(1)}
    assert gradients_differ(grads, read_from=params, rate=2.0**-20) == differs


@HALF_AND_TWICE
def test_a_buffer_differs_by_4096_units_of_its_norm(times: float, differs: bool) -> None:
    actual = {"mean": torch.tensor([1.0 + times * 2.0**-11])}
    assert (faults.differing_buffers(0, {"mean": torch.ones(1)}, actual) is not None) == differs


@HALF_AND_TWICE
@pytest.mark.parametrize(("before", "bound"), [(1.0, 2.0**-20), (0.0, 2.0**-11 + 2.0**-20)])
def test_an_update_differs_by_units_of_its_move(times: float, differs: bool, before: float, bound: float) -> None:
    expected, start = {"w": torch.ones(1)}, {"w": torch.full((1,), before)}
    actual = {"w": torch.tensor([1.0 + times * bound])}
    assert (faults.differing_parameters(0, expected, before=start, actual=actual, skipped=()) is not None) == differs


@dataclass(frozen=True, kw_only=True)
class Coupled(Objective):
    """The sum of the outputs, and a part of the square of a sum that couples the samples."""

    share: float
    by_outputs: bool

    def loss(self, model: Model, batch: Any) -> Loss:
        outputs = model(batch)
        total = (outputs if self.by_outputs else batch[:, 0]).sum()
        return Loss(loss_sum=outputs.sum() + self.share / 2 * total**2, weight=float(len(batch)))


def couples(objective: Objective) -> Sequence[tuple[str, str]]:
    """What a probe finds with two samples of 0 and two of 1; sums of four losses are 4."""
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[1.0, 0.0]]))
    samples = [torch.tensor([value, 0.0]) for value in (0.0, 0.0, 1.0, 1.0)]
    return probe(model, objective, samples, lambda batch, _: torch.stack(list(batch))).findings


@HALF_AND_TWICE
def test_a_plan_finds_gradients_and_losses_that_couple_by_64_units(times: float, differs: bool) -> None:
    assert bool(couples(Coupled(share=times * 2.0**-17, by_outputs=True))) == differs
    assert bool(couples(Coupled(share=times * 2.0**-15, by_outputs=False))) == differs
