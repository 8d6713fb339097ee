"""Code of the user that changes during a run which parameters are trained: it ends the run at that step, by name.

A parameter that code of the user freezes during a run and that goes on being trained is caught here alone.
"""

from pathlib import Path

import pytest

from tests.contract.running import run, weights
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.tensors import load

SAME = (
    "data=points", "objective=classification", "optimizer=adamw", "batch.global_size=16", "batch.micro_size=4",
    "steps=6", "eval.batch_size=4",
)  # fmt: skip
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "central_storage": ("strategy=central_storage",),
    "central_storage, async": ("strategy=central_storage", "strategy.mode=async"),
    "device_map": ("strategy=device_map", "strategy.devices=[cpu]"),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "local_sgd": ("strategy=local_sgd", "strategy.replicas=2"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2"),
}
SPREAD = ("mirrored", "fsdp", "local_sgd", "parameter_server", "pipeline")
CASES = [pytest.param(name, marks=[pytest.mark.slow] if name in SPREAD else []) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", CASES)
def test_a_callback_that_unfreezes_or_freezes_ends_the_run_at_that_step(strategy: str, tmp_path: Path) -> None:
    model, how, value = ("net", "freeze", False) if strategy == "pipeline" else ("changes_itself", "unfreeze", True)
    changing = (f"model={model}", "callbacks=[changes_params]", f"callbacks.changes_params.how={how}")
    named = rf"after step 2, requires_grad of 0\.weight, 0\.bias was changed to {value} by .* init_from=RUN"
    with pytest.raises(TrainingError, match=named):
        run(tmp_path / "run", *SAME, *changing, *STRATEGIES[strategy])


FORWARD = ("one_device", "central_storage", "mirrored", "parameter_server")
"""One device, threads, ranks and workers; the test above has all strategies."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in FORWARD else pytest.mark.matrix)
        for name in STRATEGIES
        if name != "pipeline"
    ],
)
def test_a_forward_pass_that_unfreezes_ends_the_run(strategy: str, tmp_path: Path) -> None:
    changing = ("model=changes_itself", "model.how=unfreeze")
    with pytest.raises(TrainingError, match=r"requires_grad of 0\.(weight|bias), .* was changed to True"):
        run(tmp_path / "run", *SAME, *changing, *STRATEGIES[strategy])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("freeze", r"requires_grad of 0\.weight, 0\.bias was changed to False"),
        ("replace", r"the parameter 2\.weight, 2\.bias was replaced"),
        ("add", r"the parameter 0\.scale was added"),
    ],
)
def test_other_changes_of_what_is_trained_end_the_run_too(how: str, said: str, tmp_path: Path) -> None:
    changing = ("model=net", "callbacks=[changes_params]", f"callbacks.changes_params.how={how}")
    with pytest.raises(TrainingError, match=f"after step 2, {said} by"):
        run(tmp_path / "run", *SAME, *changing)


@pytest.mark.slow
def test_a_resumed_run_ends_at_the_same_step(tmp_path: Path) -> None:
    changing = (*SAME, "model=changes_itself", "callbacks=[changes_params]", "checkpoint.every_steps=1")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"after step 2, requires_grad of"):
            run(tmp_path / "run", *changing, *(["resume=auto"] if (tmp_path / "run").exists() else []))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "unfreeze"])
def test_a_change_after_the_last_step_loses_nothing(how: str, tmp_path: Path) -> None:
    model = "net" if how == "freeze" else "changes_itself"
    changing = ("callbacks=[changes_params]", f"callbacks.changes_params.how={how}", "callbacks.changes_params.step=6")
    result = run(tmp_path / "run", *SAME, f"model={model}", *changing)
    plain = run(tmp_path / "plain", *SAME, f"model={model}")
    assert (result["status"], weights(result).keys()) == ("finished", weights(plain).keys())
    assert load(Path(result["last"])).tensors.keys() == load(Path(plain["last"])).tensors.keys()
    assert result["weights_sha256"] == plain["weights_sha256"]
