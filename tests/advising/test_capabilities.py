"""`trainkit capabilities`: an answer that is not that of a planned run is caught here."""

from __future__ import annotations

import json

import pytest

from trainkit.advising.capabilities import FEATURES, STRATEGIES, capabilities
from trainkit.cli import main


@pytest.mark.slow
def test_an_answer_is_what_a_planned_run_says() -> None:
    features = {name: FEATURES[name] for name in ("clipping", "`average=ema`", "`strategy.map`")}
    rows = [*capabilities({"local_sgd": STRATEGIES["local_sgd"]}, features)]
    assert [(row["feature"], row["supported"]) for row in rows] == [
        ("clipping", True), ("average=ema", False), ("strategy.map", None),
    ]  # fmt: skip
    assert str(rows[1]["reason"]).startswith("`average`: averages weights")


@pytest.mark.slow
def test_the_document_has_the_asked_strategies_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainkit.verbs.looking.capabilities.capabilities", lambda chosen: [{"strategy": name} for name in chosen]
    )
    assert main(["capabilities", "tensor_parallel", "pipeline", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["strategies"]] == ["mesh: tensor", "pipeline"]
    assert main(["capabilities", "pipelin"]) == 2
    assert "Did you mean pipeline?" in capsys.readouterr().err
