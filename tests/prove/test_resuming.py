"""A state that a resumed training forgets is found for the user's own config; that of the optimizer, here alone."""

from __future__ import annotations

import pytest

from trainkit.cli import main
from trainkit.strategies.core.optimizer import OptimizerStepper

DIGITS = ("prove", "--resume", "recipe=digits", "model.hidden=[8]", "--steps", "5")


@pytest.mark.slow
def test_a_resumed_training_has_the_bits_of_the_undisturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DIGITS]) == 0
    out = capsys.readouterr().out
    assert "rank 0 is ended by an error in" in out
    assert out.count("equal, every bit") == 2


@pytest.mark.slow
def test_an_optimizer_that_begins_anew_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OptimizerStepper, "restore", lambda *_: None)
    assert main([*DIGITS]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 2


@pytest.mark.slow
def test_another_cut_and_another_flag_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DIGITS, "strategy=one_device,mirrored", "strategy.replicas=2"]) == 2
    assert "batch.micro_size: is 64 and 32 for the strategies." in capsys.readouterr().err
    assert main([*DIGITS, "--same-cut"]) == 2
    assert "--same-cut: has no effect with --resume." in capsys.readouterr().err
