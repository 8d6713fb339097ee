"""Test the contract of trainkit with the model, data and objective of this package."""

from pathlib import Path

from trainkit.testing import assert_resumes, assert_same_training

CONF = Path(__file__).parents[1] / "conf"


def test_two_processes_train_what_one_trains() -> None:
    assert_same_training(
        ["recipe=spirals"],
        strategies=["mirrored strategy.replicas=2"],
        steps=3,
        config_dirs=[CONF],
        packages=["own_package"],
    )


def test_a_stopped_training_resumes() -> None:
    assert_resumes(["recipe=spirals", "epochs=2"], config_dirs=[CONF], packages=["own_package"])
