"""Which wrong rule a step follows, from the gradients of its shards: made by hand, without a training."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.present import present
from tests.support.second_device import SecondDevice, There
from trainkit import api
from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis import matching as causes
from trainkit.run.diagnosis.evidence import Shard, StepEvidence, add_up, combine
from trainkit.run.diagnosis.examining import Examiner, Probed, explain_probe, explain_updates
from trainkit.run.diagnosis.matching import Cause, Difference, Hypothesis, Matching, differing_gradients
from trainkit.run.diagnosis.plain_loop import PlainLoop
from trainkit.run.diagnosis.updates import (
    Replay,
    buffer_hypotheses,
    clipped,
    gradient_hypotheses,
    read_as_contiguous,
    update_hypotheses,
)

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
    shards = tuple(shard(place + number, weight=weight, replica=place % 2) for place, weight in weights.items())
    redrawn = tuple(shard(place, weight=weight, replica=place % 2, phase=0.7) for place, weight in weights.items())
    return StepEvidence(
        step=number,
        shards=shards,
        num_replicas=2,
        buffers={"mean": torch.zeros(4, dtype=torch.float64), "count": torch.tensor(7)},
        strides={"w": (1, 3), "b": (1,)},
        drawn_alike=lambda: redrawn,
        in_sequence=lambda chosen: {"mean": wave((4,), 9.0 + len(chosen)), "count": torch.tensor(7 + len(chosen))},
    )


def named(
    found: dict[str, Tensor], hypotheses: Iterable[Hypothesis], expected: dict[str, Tensor], at: int = 0
) -> list[Cause]:
    matching = Matching()
    matching.add(Difference(step=at, found=found, expected=expected, allowed=dict.fromkeys(found, 1e-12)), hypotheses)
    return [match.cause for match in matching.matches]


WRONG_GRADIENTS: dict[str, tuple[Cause, Callable[[StepEvidence], dict[str, Tensor]]]] = {
    "mean of shard means": (
        causes.MEAN_OF_MEANS,
        lambda s: combine(s.shards, [1 / (3 * one.weight) for one in s.shards]),
    ),
    "mean of replica means": (causes.MEAN_OF_MEANS, lambda s: combine(s.shards, [1 / 12, 1 / 6, 1 / 12])),
    "weighted by samples": (causes.MEAN_OF_MEANS, lambda s: combine(s.shards, [5 / 48, 4 / 36, 3 / 24])),
    "not reduced": (causes.NOT_REDUCED, lambda s: combine(s.shards, [1 / 9, 0, 1 / 9])),
    "not reduced, own mean": (causes.NOT_REDUCED, lambda s: combine(s.shards, [1 / 6, 0, 1 / 6])),
    "summed twice": (causes.COUNTED_TWICE, lambda s: {"b": s.gradient["b"] * 2}),
    "averaged over replicas": (causes.AVERAGED, lambda s: {name: s.gradient[name] / 2 for name in NAMES}),
    "averaged over shards": (causes.AVERAGED, lambda s: {name: s.gradient[name] / 3 for name in NAMES}),
    "read as contiguous": (causes.LAYOUT, lambda s: {"w": read_as_contiguous(s.gradient["w"], (1, 3))}),
    "drawn alike": (causes.DRAWN_ALIKE, lambda s: combine(present(s.drawn_alike)(), [1 / 9] * 3)),
}


@pytest.mark.parametrize("fault", WRONG_GRADIENTS)
def test_a_wrong_gradient_has_one_cause(fault: str) -> None:
    cause, wrong = WRONG_GRADIENTS[fault]
    evidence = step()
    assert named(wrong(evidence), gradient_hypotheses(evidence), dict(evidence.gradient)) == [cause]


def test_a_gradient_that_no_fault_gives_is_not_explained() -> None:
    evidence = step()
    found = {"w": evidence.gradient["w"] * 1.01}
    assert named(found, gradient_hypotheses(evidence), dict(evidence.gradient)) == []


def test_a_gradient_read_from_an_update_gives_two_causes_for_a_doubled_value() -> None:
    evidence = step()
    found = {name: evidence.gradient[name] * 2 for name in NAMES}
    hypotheses = gradient_hypotheses(evidence, rate_is_apart=False)
    assert named(found, hypotheses, dict(evidence.gradient)) == [causes.COUNTED_TWICE, causes.RATE]


def test_a_cause_must_give_what_differs_in_every_step() -> None:
    matching = Matching()
    for number, factor in ((0, 2.0), (1, 3.0)):  # two and three times: with 2 replicas and 3 shards both are known
        evidence = step(number)
        found = {"w": evidence.gradient["w"] * (factor if number == 0 else 1 / factor)}
        wrong = Difference(step=number, found=found, expected=evidence.gradient, allowed={"w": 1e-12})
        matching.add(wrong, gradient_hypotheses(evidence))
    assert matching.matches == []


def test_replicas_that_drift_apart_are_explained_by_their_first_step() -> None:
    matching = Matching()
    for number, factors in ((0, [1 / 9, 0, 1 / 9]), (1, [0.1, 0.2, 0.3])):
        evidence = step(number)
        wrong = combine(evidence.shards, factors)
        matching.add(
            Difference(step=number, found=wrong, expected=evidence.gradient, allowed=dict.fromkeys(NAMES, 1e-12)),
            gradient_hypotheses(evidence),
        )
    assert [match.cause for match in matching.matches] == [causes.NOT_REDUCED]


WRONG_BUFFERS: dict[str, tuple[Cause, Callable[[StepEvidence], dict[str, Tensor]]]] = {
    "averaged alike": (
        causes.BUFFERS_UNWEIGHTED,
        lambda s: {"mean": sum((one.buffers["mean"] for one in s.shards), torch.zeros(4)) / 3},
    ),
    "rank 0": (
        causes.BUFFERS_OF_ONE,
        lambda s: {"mean": (5 * s.shards[0].buffers["mean"] + 3 * s.shards[2].buffers["mean"]) / 8},
    ),
    "last of rank 0": (causes.BUFFERS_OF_ONE, lambda s: {"mean": s.shards[2].buffers["mean"]}),
    "every shard": (causes.EVERY_SHARD_MOVES, lambda s: {"mean": wave((4,), 12.0), "count": torch.tensor(10)}),
    "every shard of rank 0": (causes.BUFFERS_OF_ONE, lambda s: {"mean": wave((4,), 11.0), "count": torch.tensor(9)}),
}


@pytest.mark.parametrize("fault", WRONG_BUFFERS)
def test_wrong_buffers_have_one_cause(fault: str) -> None:
    cause, wrong = WRONG_BUFFERS[fault]
    evidence = step()
    expected = dict(add_up(evidence.shards, evidence.buffers).buffers)
    assert int(expected["count"]) == 8
    assert named(wrong(evidence), buffer_hypotheses(evidence), expected) == [cause]


def replay(*, max_norm: float | None = 0.3) -> Replay:
    model = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(wave((3, 4), 0.4))
        model.bias.copy_(wave((3,), 0.6))
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.2, "fused": True}
    params = dict(model.named_parameters())
    state = {f"optimizer/{slot}/{name}": wave(tuple(param.shape), 2.0).abs() * 0.1 for name, param in params.items()
             for slot in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    state |= {f"optimizer/step/{name}": torch.tensor(3.0) for name in params}
    return Replay(
        cfg=RunConfig(optimizer=optimizer), model=model, params=params, state=state, factor=0.5, max_norm=max_norm
    )


def linear_step() -> StepEvidence:
    """The same evidence under the names of a linear layer, whose weight is stored by columns."""
    old = step()
    shards = tuple(
        Shard(gradient={"weight": s.gradient["w"], "bias": s.gradient["b"]}, weight=s.weight, size=s.size,
              replica=s.replica) for s in old.shards
    )  # fmt: skip
    return StepEvidence(step=0, shards=shards, num_replicas=2, strides={"weight": (1, 3), "bias": (1,)})


WRONG_UPDATES: dict[str, tuple[Cause, Callable[[StepEvidence, Replay], Mapping[str, Tensor]]]] = {
    "rate by replicas": (causes.RATE, lambda s, r: r.step(clipped(s.gradient, 0.3), rate=2.0)),
    "decay by shards": (causes.DECAY_PER_SHARD, lambda s, r: r.step(clipped(s.gradient, 0.3), decay=3.0)),
    "decay, one by one": (causes.DECAY_PER_SHARD, lambda s, r: r.step(clipped(s.gradient, 0.3), times=2)),
    "no decay": (causes.NOT_DECAYED, lambda s, r: r.step(clipped(s.gradient, 0.3), decay=0.0)),
    "no clip": (causes.NOT_CLIPPED, lambda s, r: r.step(s.gradient)),
    "state lost": (causes.STATE_LOST, lambda s, r: r.step(clipped(s.gradient, 0.3), forgets=True)),
    "clipped before reducing": (
        causes.CLIPPED_APART,
        lambda s, r: r.step(combine(
            [Shard(gradient=clipped(combine(s.of_replica(rank), [1 / 9] * (2 - rank)), 0.3), weight=1, size=1)
             for rank in (0, 1)], [1, 1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_UPDATES)
def test_a_wrong_update_has_one_cause(fault: str) -> None:
    cause, wrong = WRONG_UPDATES[fault]
    evidence, again = linear_step(), replay()
    right = dict(again.step(clipped(evidence.gradient, 0.3)))
    assert named(dict(wrong(evidence, again)), update_hypotheses(evidence, again), right) == [cause]


def test_a_replayed_step_has_the_bits_of_torch_and_leaves_the_checkpoint_as_it_was() -> None:
    evidence, again = linear_step(), replay()
    first, second = again.step(evidence.gradient), again.step(evidence.gradient)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(again.state["optimizer/step/weight"]) == 3.0


def test_what_is_compared_with_checkpoints_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = PlainLoop.shards

    def on_second_device(loop: PlainLoop, step: int) -> Iterator[Shard]:
        for one in shards(loop, step):
            yield replace(one, gradient={name: There(grad) for name, grad in one.gradient.items()})

    monkeypatch.setattr(PlainLoop, "shards", on_second_device)
    with SecondDevice():
        examiner = Examiner(api.compose(["recipe=digits", "steps=2"]).cfg)
    masks = examiner.elements_without_gradient  # some pixels of the digits are always 0
    assert {name: mask.device.type for name, mask in masks.items()}["layers.0.weight"] == "cpu"


def test_a_gradient_is_compared_within_the_rounding_of_its_terms() -> None:
    """Two shards that cancel: their rounding is large beside the sum, and no difference."""
    shards = [Shard(gradient={"w": torch.ones(2) * value}, weight=1.0, size=1) for value in (1.0, -1.0 + 1e-6)]
    expected, errors = add_up(shards, {}), dict[str, float]()
    found = {"w": expected.gradient["w"] + 1e-7}
    assert differing_gradients(0, expected, found, errors=errors, read_from=None, rate=1.0) is None
    found = {"w": expected.gradient["w"] + 1e-2}
    wrong = differing_gradients(0, expected, found, errors=errors, read_from=None, rate=1.0)
    assert wrong is not None
    assert list(wrong.found) == ["w"]


def test_a_gradient_that_is_no_number_differs() -> None:
    expected = add_up([Shard(gradient={"w": torch.ones(2)}, weight=1.0, size=1)], {})
    found = {"w": torch.tensor([1.0, float("nan")])}
    assert differing_gradients(0, expected, found, errors={}, read_from=None, rate=1.0) is not None


def probed(factors: dict[str, float]) -> Probed:
    evidence, found = step(), Probed()
    wrong = {name: evidence.gradient[name] * factor for name, factor in factors.items()}
    difference = Difference(step=0, found=wrong, expected=evidence.gradient, allowed=dict.fromkeys(wrong, 1e-12))
    found.gradients.add(difference, gradient_hypotheses(evidence))
    return found


def test_an_answer_names_the_rule_the_tensor_and_the_page() -> None:
    (line,) = explain_probe(probed({"b": 2.0}))
    assert line == (
        "explained by: rule 3 (gradient): the sum of the gradients, added up again; "
        "gradient/b of step 1 fits this to 0 (2 times) (docs/numbers.md#3-gradient)"
    )


def test_an_answer_that_fits_nothing_says_what_was_ruled_out() -> None:
    first, second = explain_probe(probed({"b": 1.7}))
    assert first == (
        "not explained: the gradients differ from a plain loop's in a way that no known fault explains; ruled out:"
    )
    assert second.startswith("  the mean of the shards' means; the gradient of one replica, not added ")


def test_all_causes_with_the_same_numbers_are_named() -> None:
    evidence, found = step(), Probed()
    wrong = {"b": evidence.gradient["b"] * 2}
    difference = Difference(step=0, found=wrong, expected=evidence.gradient, allowed={"b": 1e-12})
    found.gradients.add(difference, gradient_hypotheses(evidence, rate_is_apart=False))
    lines = list(explain_probe(found))
    assert lines[0] == "explained by one of these, which the numbers cannot distinguish:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  rule 3 (gradient)", "  rule 6 (learning rate)"]


def test_a_training_that_differs_in_no_step_of_its_own_is_not_explained() -> None:
    (line,) = explain_updates(Matching())
    assert line.startswith("not explained: every gradient, and every step taken alone from the candidate's own ")
