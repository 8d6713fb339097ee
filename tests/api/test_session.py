"""A loop of the user's own whose weights differ from those of the trainer's by one bit is caught here alone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainkit
from tests.launchers.joining import free_port
from tests.support.pool import Pool
from tests.support.results import result_of
from tests.support.settings import latest
from trainkit.api.calls import TrainingResult
from trainkit.api.own_loop import Session
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, TrainingError
from trainkit.objectives.base import Loss
from trainkit.strategies.base import LoopCall, PlanContext

PAGE = Path(__file__).resolve().parents[2] / "docs" / "a-loop-of-your-own.md"
RUN = (
    "recipe=null", "steps=6", "batch.global_size=32", "batch.micro_size=12", "quiet=true", "callbacks=[]", "logger=[]",
)  # fmt: skip
HARD = ("model.dropout=0.2", "clip.max_norm=0.5", "warmup.steps=3", "eval.every_steps=2")
OVERFLOWS = ("precision=fp16_mixed", "precision.initial_scale=1e9")


def opened(folder: Path, *overrides: str, **settings: Any) -> Session:
    return trainkit.session(latest(*RUN, *overrides), run_dir=folder, **settings)


def run(loop: Callable[[Session], object], folder: Path, *overrides: str, **settings: Any) -> TrainingResult:
    with opened(folder, *overrides, **settings) as session:
        loop(session)
    assert session.result is not None
    return session.result


def by_steps(session: Session) -> None:
    for _ in session.batches():
        session.step()


def by_own_loss(session: Session) -> None:
    while session.steps < 6:
        session.step(partial(session.objective.loss))


def apart(session: Session) -> None:
    for _ in session.batches():
        session.forward_backward()
        session.update()


@pytest.mark.parametrize("settings", [HARD, OVERFLOWS], ids=["keyed, clipped, accumulated", "overflows"])
@pytest.mark.slow
def test_a_loop_ends_in_the_weights_of_the_trainer(settings: tuple[str, ...], tmp_path: Path) -> None:
    expected = trainkit.train([*RUN, *settings], run_dir=tmp_path / "trainer")["weights_sha256"]
    for number, loop in enumerate((by_steps, by_own_loss, apart)):
        assert run(loop, tmp_path / str(number), *settings)["weights_sha256"] == expected


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_end_in_the_weights_of_the_trainer(strategy: str, pool: Pool, tmp_path: Path) -> None:
    arguments = (str(tmp_path), free_port(), *RUN, *HARD, f"strategy={strategy}")
    chief, other = pool.run("tests.api.own_loops.weights_of_both", *arguments, num_ranks=2)
    assert chief[0] == chief[1] is not None
    assert other == (None, None)


def test_a_rank_whose_loop_fails_ends_the_others_and_is_named(pool: Pool, tmp_path: Path) -> None:
    arguments = (str(tmp_path), free_port(), *RUN, "strategy=mirrored", "numerics.reproducible=true")
    ends = pool.run("tests.api.own_loops.failure_of_a_loop", *arguments, num_ranks=2)
    assert all("failed in step 2" in end and "ValueError: enough" in end for end in ends)
    assert [end.partition(":")[0] for end in ends] == ["TrainingError", "PeerError"]


@pytest.mark.slow
def test_a_loop_that_is_left_is_continued_to_the_same_bits(tmp_path: Path) -> None:
    expected = trainkit.train([*RUN, *HARD], run_dir=tmp_path / "whole")["weights_sha256"]
    for name in ("loop", "trainer"):
        with opened(tmp_path / name, *HARD) as session:
            for _ in session.batches():
                session.step()
                if session.steps == 3:
                    break
        assert session.result is not None
        status, reason = session.result["status"], session.result["reason"]
        assert (status, reason, session.exit_code) == ("stopped", "the loop was left", 0)
    assert run(by_steps, tmp_path / "loop", *HARD, "resume=auto")["weights_sha256"] == expected
    assert trainkit.train([*RUN, *HARD, "resume=auto"], run_dir=tmp_path / "trainer")["weights_sha256"] == expected


def test_steps_with_a_loss_of_the_loop_are_continued_by_a_loop_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as session:
        session.step(lambda model, batch: model(batch[0]).square().mean())
    assert session.result is not None
    assert session.result["own_loss"] is True
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"steps with a loss from its own loop \(trainkit.session\)"):
        trainkit.train([*RUN, "resume=auto"], run_dir=tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    with opened(tmp_path / "run", "resume=auto") as session:
        assert session.steps == 1


def test_a_mean_weighs_each_shard_by_its_samples(tmp_path: Path) -> None:
    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    grads: list[dict[str, torch.Tensor]] = []
    for number, loss in enumerate((None, mean)):
        with opened(tmp_path / str(number), "precision=fp64", "batch.micro_size=10") as session:  # shards of 8 each
            session.forward_backward(loss)
            grads.append(dict(session.gradients()))
            session.update()
    assert grads[0].keys() == grads[1].keys()
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-12, atol=1e-14)


def test_a_loss_and_its_terms_replace_the_objective(tmp_path: Path) -> None:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x[:32]), TensorDataset(x[32:])

    def penalised(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        (inputs,) = batch
        return {"error": (model(inputs) - inputs).square().mean(), "size": model(inputs).abs().mean()}

    def loop(session: Session) -> None:
        for _ in session.batches():
            session.step()
            session.log(steps_left=3 - session.steps)
        metrics.update(session.evaluate())

    metrics: dict[str, float] = {}
    settings: dict[str, Any] = {"model": nn.Linear(4, 4), "data": data, "loss": penalised, "terms": ["error", "size"]}
    run(loop, tmp_path / "run", "steps=3", "batch.global_size=16", "batch.micro_size=8", **settings)
    assert metrics["val/loss"] == pytest.approx(metrics["val/error"] + metrics["val/size"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any({"train/error", "train/size"} <= row.keys() for row in rows)
    assert rows[-1].get("steps_left", rows[-2].get("steps_left")) == 0


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "nothing": (lambda _model, _batch: None, "loss_fn gives None, not a tensor of one number"),
    "a vector": (lambda model, batch: model(batch[0]).mean(1), "Is a .mean() missing?"),
    "no graph": (lambda model, batch: model(batch[0]).mean().detach(), "depends on no parameter that is trained"),
    "counts": (lambda model, batch: model(batch[0]).argmax(), "which has no gradient"),
    "unnamed terms": (lambda model, batch: {"a": model(batch[0]).mean()}, "trainkit.session(..., terms=['a'])"),
    "another weight": (lambda model, batch: Loss(model(batch[0]).sum(), 5.0), "divides this shard by 8"),
    "not a number": (lambda model, batch: model(batch[0]).mean() * float("nan"), "step 0: the loss is nan"),
}


@pytest.mark.parametrize("named", WRONG)
def test_a_loss_that_is_none_is_refused_by_what_it_is(named: str, tmp_path: Path) -> None:
    loss, message = WRONG[named]
    with pytest.raises(TrainingError, match=re.escape(message)):
        run(lambda session: session.step(loss), tmp_path / "run", "batch.micro_size=8", "objective.ignore_index=null")
    assert result_of(tmp_path / "run")["status"] == "failed"


def in_another(session: Session) -> None:
    with trainkit.session([*RUN], run_dir=session.folder.parent / "other"):
        pass


def with_a_name_of_the_trainer(session: Session) -> None:
    session.log(lr=1.0)
    session.step()


def two_steps_a_batch(session: Session) -> None:
    for _ in session.batches():
        session.step()
        session.step()


MISUSED: dict[Callable[[Session], object], str] = {
    two_steps_a_batch: "the step of these batches is already done",
    lambda session: [*session.batches()]: "no step was made with the batches of step 0",
    lambda session: [session.step() for _ in range(7)]: "all 6 steps are done",
    lambda session: (session.forward_backward(), session.step()): "call session.update() next",
    in_another: "another session is open",
    Session.update: "call session.forward_backward() first",
    Session.forward_backward: "call session.update() next",
    with_a_name_of_the_trainer: "lr is a figure of the trainer",
    lambda session: session.log(lr="high"): "lr is a str",  # type: ignore[arg-type]
    lambda session: session.step(3): "loss_fn is a int",  # type: ignore[arg-type]
    lambda _one: sys.exit(0): "the process was to exit with code 0",
}


@pytest.mark.parametrize("loop", MISUSED)
def test_calls_out_of_order_end_the_run_by_name(loop: Callable[[Session], object], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=re.escape(MISUSED[loop])):
        run(loop, tmp_path / "run")
    assert result_of(tmp_path / "run")["status"] == "failed"


def test_a_session_is_used_inside_of_its_block_and_once(tmp_path: Path) -> None:
    session = opened(tmp_path / "run")
    with pytest.raises(TrainingError, match="not open yet"):
        session.step()
    with session:
        session.step()
    with pytest.raises(TrainingError, match="the session has ended"):
        session.step()
    with pytest.raises(TrainingError, match="this session has ended"):
        session.__enter__()


def test_an_error_of_the_loop_leaves_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda session: (session.step(), session.step(), 1 / 0), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


def test_a_signal_ends_the_loop_and_gives_its_exit_code(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as session:
        for _ in session.batches():
            os.kill(os.getpid(), signal.SIGTERM)
            session.step()
    assert session.result is not None
    assert (session.result["steps"], session.result["status"], session.exit_code) == (1, "preempted", 143)


def test_a_callback_that_ends_the_run_in_the_word_of_a_signal_lets_it_finish(tmp_path: Path) -> None:
    ends = "callbacks={ends:{_target_:tests.api.own_loops.Ends}}"
    with opened(tmp_path / "run", ends, packages=["tests"]) as session:
        by_steps(session)
    assert session.result is not None
    assert (session.result["status"], session.result["reason"], session.exit_code) == ("finished", "stopped", 0)


def test_data_without_validation_is_named(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long))
    settings = {"model": nn.Linear(4, 2), "data": data, "objective": "classification"}
    with pytest.raises(TrainingError, match=r"the data has no validation split. It has: train"):
        run(Session.evaluate, tmp_path / "run", **settings)


REFUSED = {
    ("strategy=mirrored",): r"Start:\n    torchrun --nproc-per-node 2 ",
    ("strategy=parameter_server",): "strategy=parameter_server: refuses trainkit.session: its workers",
    ("strategy=central_storage", "strategy.mode=async"): "strategy=central_storage: refuses trainkit.session",
    ("eval.beside=true",): "eval.beside=true: starts a process that does not run the loop",
    ("cluster=spec", "cluster.worker=[a:1,b:1]", "cluster.evaluator=[c:1]", "cluster.task=worker:0"): (
        "cluster.evaluator: does not run the loop of the script"
    ),
    ("hydra.verbose=true",): "hydra.verbose: is for the command line",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_a_loop_of_this_process_is_refused_before_anything(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        opened(tmp_path / "run", *overrides).__enter__()
    assert not (tmp_path / "run").exists()


def test_a_strategy_refuses_the_call_that_it_cannot_serve(tmp_path: Path) -> None:
    message = r"strategy=central_storage: refuses forward_backward\(\) and update\(\): its threads"
    with opened(tmp_path / "run", "strategy=central_storage") as session:
        session.step(lambda model, batch: model(batch[0]).square().mean())
        with pytest.raises(ConfigError, match=message):
            session.forward_backward()


@pytest.mark.slow
def test_steps_in_phases_are_taken_whole_with_the_losses_of_the_objective(tmp_path: Path) -> None:
    with trainkit.session(["recipe=gan", "steps=2", "quiet=true"], run_dir=tmp_path / "run") as session:
        session.step()
        with pytest.raises(ConfigError, match=r"Use step\(\)"):
            session.forward_backward()
        with pytest.raises(ConfigError, match=r"Use step\(\)"):
            session.step(lambda model, _: model(1))


def test_the_table_of_the_page_is_what_the_strategies_declare() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows.keys() == {file.stem for file in (PAGE.parents[1] / "conf" / "strategy").glob("*.yaml")}
    for name, cells in rows.items():
        assert cells.split(" | ") == served_by(name), name


def served_by(name: str) -> list[str]:
    strategy = build(trainkit.compose([f"strategy={name}"]).cfg.strategy, "strategy")
    refused = strategy.facts_in(PlanContext(num_gpus=2)).refused_calls
    whole = all(strategy.next_sync_step(step) == step for step in range(20))
    calls = (LoopCall.session, LoopCall.own_loss, LoopCall.apart)
    steps = ["refused" if {LoopCall.session, call} & refused.keys() else "yes" for call in calls]
    between = "refused" if LoopCall.session in refused else "yes" if whole else "after an average"
    return [*steps, between]


@pytest.mark.slow
def test_the_scripts_of_the_page_run(cwd: Path) -> None:
    """The last one is a file, which the page starts itself (tests/packaging/test_docs.py)."""
    *blocks, _ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "train.py", "exec"), {"__name__": "__main__"})
    results = [json.loads(file.read_text()) for file in cwd.glob("outputs/*/*/result.json")]
    assert [result["status"] for result in results] == ["finished"] * 3
