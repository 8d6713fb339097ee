"""Whether two trainings, as they would be started, are the same is told by their keys and their cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.config.compose import compose
from trainkit.config.schema import RunConfig
from trainkit.run.equivalence import Sameness
from trainkit.run.equivalence.answers import same_training
from trainkit.run.planning.coupling import COUPLES, MODEL, Coupling
from trainkit.run.planning.plan import make_plan

NOTHING, COUPLED = Coupling(), Coupling(found=((MODEL, COUPLES),))


def unasked() -> Coupling:
    raise AssertionError("the model was run where the cut cannot matter")


def sameness(*arguments: str, coupling: Callable[[], Coupling] = unasked, base: tuple[str, ...] = ()) -> Sameness:
    reference, candidate = (
        make_plan(RunConfig.from_dict(compose(["recipe=digits", *base, *more]).values)) for more in ((), arguments)
    )
    return same_training(reference, candidate, coupling, accumulates="batch.accumulation=2" in base)


@pytest.mark.parametrize(
    "arguments",
    [
        ("strategy=device_map",),
        ("strategy=mirrored", "strategy.replicas=1"),
        ("strategy=fsdp", "loader.num_workers=2", "eval.batch_size=7", "name=other"),
    ],
)
def test_an_equal_cut_is_the_same_training_whatever_the_model_is(arguments: tuple[str, ...]) -> None:
    base = ("batch.micro_size=32",) if "strategy=fsdp" in arguments else ()
    assert sameness(*arguments, base=base).verdict == "yes"


def test_reproducible_runs_have_one_cut_on_any_number_of_replicas() -> None:
    assert sameness("strategy=mirrored", base=("numerics.reproducible=true",)).verdict == "yes"


def test_another_cut_matters_to_a_model_that_couples_samples() -> None:
    arguments = "strategy=mirrored", "strategy.replicas=4"
    assert sameness(*arguments, coupling=lambda: NOTHING).verdict == "yes"
    found = sameness(*arguments, coupling=lambda: COUPLED)
    assert (found.verdict, found.remedy) == ("no", "batch.micro_size=16")
    assert sameness(*arguments, base=("batch.micro_size=16",)).verdict == "yes"  # the remedy, pasted


def test_the_remedy_takes_the_place_of_accumulation() -> None:
    found = sameness("strategy=mirrored", coupling=lambda: COUPLED, base=("batch.accumulation=2",))
    assert found.remedy == "batch.micro_size=16 instead of batch.accumulation"


def test_an_unknown_coupling_gives_an_unknown_verdict() -> None:
    found = sameness("strategy=mirrored", coupling=lambda: Coupling(not_probed="it is too large"))
    why = "batch.micro_size is 32 here and 64 under one_device; coupling: not probed, it is too large"
    assert found == Sameness(verdict="unknown", reasons=(why,), remedy="batch.micro_size=32")


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (
            ["strategy=mirrored", "strategy.compression=bf16", "optimizer.lr=0.5"],
            [
                "optimizer.lr is 0.5 here and 0.01 under one_device",
                "strategy.compression=bf16 counts as maths, and one_device has no such key",
            ],
        ),
        (["strategy=local_sgd"], ["this strategy is a different training from that of one_device"]),
        (
            ["strategy=parameter_server", "strategy.mode=async"],
            ["strategy.mode=async counts as maths, and one_device has no such key"],
        ),
        (["seed=1"], ["seed is 1 here and 0 under one_device"]),
    ],
)
def test_keys_that_change_the_result_are_named_and_no_cut_helps(arguments: list[str], reasons: list[str]) -> None:
    found = sameness(*arguments)
    assert (found.verdict, list(found.reasons), found.remedy) == ("no", reasons, None)


def test_a_batch_that_follows_the_replicas_is_another_training() -> None:
    base = ("batch.global_size=null", "batch.micro_size=8", "batch.accumulation=2")
    assert sameness("strategy=mirrored", base=base).reasons == ("batch.global_size is 32 here and 16 under one_device",)
