from __future__ import annotations

import logging

import pytest
from torch import nn
from torch._inductor import config

from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms


def test_max_autotune_reports_what_the_environment_asks_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch._inductor.select_algorithm")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS", "1")
    with config.patch(autotune_num_choices_displayed=10, max_autotune_report_choices_stats=True):
        apply_transforms(nn.Linear(2, 2), ModelTransforms(compile_mode="max-autotune"), compiles="model")
        assert (config.autotune_num_choices_displayed, config.max_autotune_report_choices_stats) == (0, True)
    texts = ["Exception %s for benchmark choice %s", "Runtime error during autotuning"]
    records = [log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None) for text in texts]
    assert [bool(log.filter(record)) for record in records] == [False, True]
