"""A text sample that fails a finished training, or a rank that leaves the others alone in a collective, is caught here
alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.callbacks.run_double import run_double
from trainkit.callbacks.sample import Sample
from trainkit.data.sets.text import PythonSource
from trainkit.errors import ConfigError
from trainkit.models.gpt import Gpt
from trainkit.trainer.events import Run


def writing_run(folder: Path, vocab_size: int = 256) -> Run:
    run = run_double(folder)
    run.model = Gpt(vocab_size=vocab_size, context=8, num_layers=1, num_heads=1, width=4)
    run.datasets = {"train": PythonSource(split="train", context=8, max_bytes=1000)}
    return run


def test_the_end_prints_a_sample_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sample = writing_run(tmp_path), Sample(prompt="def ", num_tokens=5)
    sample.run_start(run)
    sample.train_end(run, {"status": "finished"})
    kept = (tmp_path / "sample.txt").read_bytes().decode()  # an untrained model writes "\\r" too
    assert kept.startswith("def ")
    assert capsys.readouterr().out.startswith("sample\n  def ")
    assert sample.text(run) + "\n" == kept


def test_a_token_that_the_text_does_not_have_fails_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Sample(num_tokens=20, top_k=None).train_end(writing_run(tmp_path, 100_000), {"status": "finished"})
    (message,) = caplog.messages
    assert message.startswith("sample: the dataset cannot decode the tokens of the model: ")


def test_what_cannot_write_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.sample: .* missing: generate, encode"):
        Sample().run_start(run_double(tmp_path))
    with pytest.raises(ConfigError, match=r"callbacks.sample.prompt='': "):
        Sample(prompt="").run_start(writing_run(tmp_path))


def test_every_rank_takes_part_where_ranks_compute_together_and_the_owner_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Run] = []

    def text(_: Sample, asking: Run) -> str:
        asked.append(asking)
        return "text"

    monkeypatch.setattr(Sample, "text", text)
    run = run_double(tmp_path)
    for status, run.is_owner, run.computes_together, takes_part, writes in (
        ("failed", True, False, False, False),
        ("finished", False, False, False, False),
        ("finished", False, True, True, False),
        ("finished", True, True, True, True),
    ):
        asked.clear()
        Sample().train_end(run, {"status": status})
        assert (bool(asked), (tmp_path / "sample.txt").exists()) == (takes_part, writes)
