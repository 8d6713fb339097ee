"""A user's test that passes although a training is another one, or not resumed to the bit, is caught here alone."""

from pathlib import Path

import pytest

from trainkit import ConfigError
from trainkit.testing import assert_resumes, assert_same_training

SMALL = ["recipe=null", "optimizer=sgd", "optimizer.lr=0.1", "steps=4", "callbacks=[]", "logger=[]"]
THREADS = "central_storage strategy.compute_devices=[cpu,cpu]"
MEANS = "one_device strategy._target_=tests.end_to_end.wrong.MeanOfMeans batch.micro_size=24"
KEYS_OF_MLP = ("in_features", "hidden", "out_features", "activation", "dropout", "batch_norm")
FORGETFUL = "model._target_=tests.outside.forgetful.Forgetful"


def test_a_strategy_that_is_the_same_training_passes(cwd: Path) -> None:
    assert_same_training(SMALL, strategies=[THREADS], steps=2)
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_a_strategy_of_other_numbers_is_reported_with_the_command_that_shows_it() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_training(SMALL, strategies=[THREADS, MEANS], steps=2, packages=["tests"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("strategy=one_device")
    assert "  the same numbers, both with batch.micro_size=24: NO" in lines
    command = "trainkit prove --allow-package tests recipe=null optimizer=sgd optimizer.lr=0.1 steps=4"
    assert lines[-1].startswith(f"To reproduce it: {command}")


@pytest.mark.slow
def test_a_cut_that_a_model_depends_on_is_another_training_unless_only_the_numbers_are_asked_for() -> None:
    drawing = [*SMALL, "model.dropout=0.5"]
    with pytest.raises(AssertionError, match=r"both are the same training with batch\.micro_size=32"):
        assert_same_training(drawing, strategies=[THREADS], steps=1)
    assert_same_training(drawing, strategies=[THREADS], steps=1, same_cut=True)


@pytest.mark.slow
def test_attention_is_proved_whose_key_bias_has_no_gradient_but_rounding() -> None:
    attending = [line for line in SMALL if not line.startswith("optimizer")] + ["optimizer=adamw", "batch.micro_size=5"]
    model = ["model._target_=tests.outside.forgetful.Attending", *(f"~model.{key}" for key in KEYS_OF_MLP)]
    assert_same_training([*attending, *model], strategies=[THREADS], steps=4, packages=["tests"])


def test_a_config_with_problems_is_refused_as_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="no such key in mlp"):
        assert_same_training([*SMALL, "model.widht=3"], strategies=[THREADS])
    with pytest.raises(ConfigError, match="no such key in mlp"):
        assert_resumes([*SMALL, "model.widht=3"])


@pytest.mark.slow
def test_a_training_resumes_to_the_bit_and_under_another_strategy(cwd: Path) -> None:
    assert_resumes([*SMALL, "numerics.reproducible=true", "model.dropout=0.5"])
    threads = ["strategy=central_storage", "strategy.compute_devices=[cpu,cpu]"]
    assert_resumes([*SMALL, "batch.micro_size=32"], stop_at_step=1, then=threads)
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_a_model_with_state_that_no_checkpoint_has_is_reported() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_resumes([*SMALL, FORGETFUL], packages=["tests"])
    text = str(caught.value)
    assert text.startswith(
        "4 steps without a stop and 2 + 2 steps with a resume end with different weights: 4 of 4 parameters"
    )
    assert "Keep a counter of the model in a buffer" in text


@pytest.mark.slow
def test_a_difference_below_rounding_is_one_where_equal_bits_are_promised() -> None:
    slightly = [*SMALL, "model._target_=tests.outside.forgetful.Slightly", "precision=fp64"]
    assert_resumes(slightly, packages=["tests"])
    with pytest.raises(AssertionError, match="end with different weights"):
        assert_resumes([*slightly, "numerics.reproducible=true"], packages=["tests"])


def test_a_training_too_short_to_be_stopped_is_refused() -> None:
    with pytest.raises(AssertionError, match="a training of 1 steps cannot be stopped after step 0"):
        assert_resumes([line for line in SMALL if line != "steps=4"] + ["steps=1"])
