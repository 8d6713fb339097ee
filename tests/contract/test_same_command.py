"""The same command twice, and with other workers: the same weights, for models and objectives that draw.

Numbers that differ between two runs of one command, by the time, the workers of data or a hash is caught here alone.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.running import run

POINTS: Final = ("steps=6", "batch.global_size=16", "batch.micro_size=4", "data=slow", "eval.every_steps=3")
UNTIDY: Final = {
    "functional_dropout": ("model=functional_dropout", "objective=classification"),
    "vae": ("model=vae", "objective=classification"),
    "drop_path": ("model=drop_path", "model.host=true", "objective=classification"),
    "diffusion": ("model=net", "objective=diffusion"),
    "two_views": ("model=functional_dropout", "objective=two_views"),
    "mixup": ("model=net", "objective=mixup"),
    "masked_words": ("model=attention", "objective=masked_words", "data.of=sentences"),
}

WITHOUT_KEYS: Final = "model=functional_dropout"
CLASSIFIED: Final = (WITHOUT_KEYS, "objective=classification")
SHORT: Final = ("functional_dropout", "drop_path", "diffusion", "masked_words")
"""A model that draws, one that draws on the host, an objective that draws, and one that changes its inputs."""
LONG: Final = ("mixup", "transposed_tied", "object", "in_place")
"""A transform of batches, strides of tied parameters, a block that returns an object, one that writes to its input."""
# Models that draw nothing: their runs differed where restored or exchanged tensors lay in memory otherwise.
OTHERS: Final = {
    "channels_last": ("objective=classification", "model=channels_last", "data.of=pictures"),
    "transposed": (*CLASSIFIED, "model._target_=tests.support.zoo.transposed"),
    "transposed_tied": (
        *(WITHOUT_KEYS, "model._target_=tests.support.zoo.transposed_tied"),
        *("objective=masked_words", "data.of=sentences"),
    ),
    "half_frozen": (*CLASSIFIED, "model._target_=tests.support.zoo.HalfFrozen"),
    "object": (*CLASSIFIED, "model._target_=tests.support.refused_models.ObjectBetweenBlocks"),
    "list": (*CLASSIFIED, "model._target_=tests.support.refused_models.ListBetweenBlocks"),
    "in_place": (*CLASSIFIED, "model._target_=tests.support.object_models.WritingInPlace"),
}


def mark_of(name: str) -> Any:
    return () if name in SHORT else pytest.mark.long if name in LONG else pytest.mark.matrix


def ended(folder: Path, *overrides: str) -> tuple[str, float]:
    result = run(folder, *POINTS, *overrides)
    return result["weights_sha256"], result["metrics"]["val/loss"]


@pytest.mark.parametrize("name", [pytest.param(one, marks=mark_of(one)) for one in (*UNTIDY, *OTHERS)])
@pytest.mark.slow
def test_two_runs_of_one_command_end_in_the_same_bits(name: str, tmp_path: Path) -> None:
    command = (UNTIDY | OTHERS)[name]
    once = ended(tmp_path / "once", *command)
    assert ended(tmp_path / "again", *command) == once
    assert ended(tmp_path / "apart", *command, "loader.num_workers=2") == once


@pytest.mark.slow
def test_an_evaluation_draws_the_same_on_two_replicas_and_after_a_resume(tmp_path: Path) -> None:
    vae = (*UNTIDY["vae"], "eval.batch_size=4")
    _, loss = ended(tmp_path / "whole", *vae)
    for strategy in ("mirrored", "pipeline", "parameter_server"):
        _, spread = ended(tmp_path / strategy, *vae, f"strategy={strategy}")
        assert spread == pytest.approx(loss, rel=1e-12), strategy
    first = run(tmp_path / "begun", *POINTS, *vae, "stop_at_step=4")
    _, resumed = ended(tmp_path / "ended", *vae, f"resume={first['last']}")
    assert resumed == loss
