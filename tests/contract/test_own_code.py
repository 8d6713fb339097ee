"""Code of users in whole runs: data, objectives, callbacks, metrics, and models that change inputs or parameters.

A collate or weight of samples that draws otherwise with another layout, a term that is logged as a mean of means, a
callback whose tensors a resume forgets, a table that counts the padding of a rank, a repeated step of overwritten
samples, and a parameter that code freezes during a run and that goes on being trained are caught here alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor, nn

import trainkit
from tests.contract.running import run, weights
from tests.contract.stepping import PLACES, TASKS, Case, oracle, train
from tests.support import reference, zoo
from tests.support.pool import Pool
from tests.support.results import result_of
from tests.support.zoo import Net, Points, fill
from trainkit.errors import ConfigError, DataError, TrainingError
from trainkit.models.gan import Gan
from trainkit.objectives.base import needs_of
from trainkit.strategies.base import PlanContext
from trainkit.strategies.parameter_server import ParameterServer
from trainkit.trainer.checkpoint.tensors import load

FIXED = ("model=net", "batch.global_size=16", "batch.micro_size=5", "optimizer=sgd", "epochs=2")
OWN = "tests.support.own_data"


def data_keys(name: str) -> tuple[str, str]:
    return "data=own", f"data._target_={OWN}.{name}"


@pytest.mark.parametrize(("dataset", "workers"), [("NamedPoints", 0), ("ScannedPoints", 2)])
@pytest.mark.slow
def test_fields_of_any_names_train_as_a_pair_does(tmp_path: Path, dataset: str, workers: int) -> None:
    plain = run(tmp_path / "a", *FIXED, "data=points")
    fields = ("objective.input=voxels", "objective.target=diagnosis", f"loader.num_workers={workers}")
    named = run(tmp_path / "b", *FIXED, *data_keys(dataset), *fields)
    assert named["weights_sha256"] == plain["weights_sha256"]
    assert named["metrics"] == plain["metrics"]


def test_fields_that_are_not_known_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has the fields voxels, site, diagnosis, and none is known as the input"):
        run(tmp_path / "a", *FIXED, *data_keys("NamedPoints"))
    with pytest.raises(ConfigError, match=r"objective\.target=grade: there is no such field: a sample has voxels, "):
        run(tmp_path / "a", *FIXED, *data_keys("NamedPoints"), "objective.input=voxels", "objective.target=grade")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), ("strategy=mirrored", "strategy.replicas=2")], ids=["one", "mirrored"])
def test_each_split_is_evaluated_under_its_name(
    tmp_path: Path, strategy: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "a", *FIXED, *data_keys("SplitPoints"), "eval.metric=val_ood/accuracy", *strategy)
    metrics, plain = result["metrics"], run(tmp_path / "b", *FIXED, "data=points")["metrics"]
    kinds = ("val", "val_ood", "test", "test_new")
    assert sorted(metrics) == sorted(f"{split}/{name}" for split in kinds for name in ("accuracy", "loss"))
    assert metrics["val/loss"] == metrics["test/loss"] == pytest.approx(plain["val/loss"], rel=1e-12)
    assert metrics["val_ood/loss"] != metrics["val/loss"]
    assert "the split calibration is not evaluated" in capfd.readouterr().out
    assert [row["val_ood/loss"] for row in rows(tmp_path / "a") if "val_ood/loss" in row] != []


def test_a_monitored_metric_of_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.metric=val_far/loss: the data has the validation splits val, val"):
        run(tmp_path / "a", *FIXED, *data_keys("SplitPoints"), "eval.metric=val_far/loss")


@pytest.mark.slow
def test_an_iterable_dataset_with_a_length_is_a_stream(tmp_path: Path) -> None:
    stream = run(tmp_path / "a", *FIXED, "data=stream_of_points")
    result = run(tmp_path / "b", *FIXED, *data_keys("PointStream"))
    assert result["weights_sha256"] == stream["weights_sha256"]
    assert "val/loss" in result["metrics"]


@pytest.mark.slow
def test_datasets_of_any_classes_become_splits(tmp_path: Path) -> None:
    point = "{_target_: tests.support.zoo.Points, split: %s}"
    splits = ("data=splits", f"data.train={point % 'train'}", f"data.others={{val_far: {point % 'val'}}}")
    result = run(tmp_path / "a", *FIXED, *splits, "eval.metric=val_far/loss")
    plain = run(tmp_path / "b", *FIXED, "data=points")
    assert result["weights_sha256"] == plain["weights_sha256"]
    assert result["metrics"]["val_far/loss"] == plain["metrics"]["val/loss"]


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SENTENCES = ("model=attention", "objective=language_modelling", "optimizer=sgd", "batch.global_size=8",
             "batch.micro_size=3", "steps=8", "schedule=constant", "optimizer.lr=0.2")  # fmt: skip
RAGGED = (*SENTENCES, *data_keys("RaggedSentences"))
ONE = ("strategy=one_device",)
MIRRORED = ("strategy=mirrored", "strategy.replicas=2")
FSDP = ("strategy=fsdp", "strategy.replicas=2")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [(ONE, 2), (FSDP, 0)], ids=["workers", "fsdp"])
def test_padded_sequences_train_by_their_tokens_on_every_layout(
    tmp_path: Path, strategy: tuple[str, ...], workers: int
) -> None:
    settings = (*RAGGED, f"data.collate={OWN}.pad", f"loader.num_workers={workers}", *strategy)
    first = run(tmp_path / "a", *settings, "stop_at_step=5")  # in the second epoch
    assert first["steps"] == 5
    result = run(tmp_path / "a", *settings, "resume=auto")
    data, held_out = zoo.Sentences(), run(tmp_path / "b", *SENTENCES, "data=sentences")
    expected = reference.train(
        zoo.Attention(), [data[index] for index in range(29)], zoo.tokens_sum, optimizer=reference.sgd(),
        rate=lambda _: 0.2, num_steps=8, global_size=8, seed=3,
    )  # fmt: skip
    assert reference.differences(weights(result), expected) == []
    assert result["metrics"]["val/loss"] == pytest.approx(held_out["metrics"]["val/loss"], rel=1e-12)


@pytest.mark.slow
def test_what_a_collate_draws_is_keyed_by_the_shard(tmp_path: Path) -> None:
    settings = (*RAGGED, f"data.collate={{_target_: {OWN}.hide_words, share: 0.3}}")
    alone = run(tmp_path / "a", *settings)
    spread = run(tmp_path / "b", *settings, *MIRRORED, "loader.num_workers=2", "stop_at_step=5")
    assert spread["steps"] == 5
    spread = run(tmp_path / "b", *settings, *MIRRORED, "loader.num_workers=2", "resume=auto")
    expected, actual = weights(alone), weights(spread)
    assert all(torch.allclose(expected[name], actual[name], rtol=1e-11, atol=1e-13) for name in expected)
    assert spread["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-11)
    plain = weights(run(tmp_path / "c", *RAGGED, f"data.collate={OWN}.pad"))
    assert not all(torch.allclose(expected[name], plain[name]) for name in expected)


def test_bad_collates_and_ragged_samples_end_with_the_key_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(\d,\)\) differs from .* need a collate: data\.collate=PACKAGE\.FUNCTION"):
        run(tmp_path / "a", *RAGGED)
    with pytest.raises(DataError, match=r"^data\.collate=tests\.support\.own_data\.drop_one makes \(int64 \(1, 1\), "):
        run(tmp_path / "b", *RAGGED, f"data.collate={OWN}.drop_one")
    with pytest.raises(ConfigError, match=r"loader\.cache=true: data\.collate makes its batches of single samples"):
        run(tmp_path / "c", *RAGGED, f"data.collate={OWN}.pad", "loader.cache=true")
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match=r"data\.collate=os\.listdir: os is not among the packages"):
        run(tmp_path / "d", *RAGGED, "data.collate=os.listdir")


@pytest.mark.slow
def test_a_batch_transform_draws_alike_on_two_replicas_and_after_a_resume(tmp_path: Path) -> None:
    mixup = "{_target_: trainkit.data.MixUp, num_classes: 3, alpha: 1.0}"
    settings = (*FIXED, f"data.batch_transform={mixup}")
    alone = run(tmp_path / "a", *settings, "data=points")
    fields = ("objective.input=voxels", "objective.target=diagnosis", "loader.num_workers=2", *MIRRORED)
    named = mixup.replace("}", ", input: voxels, target: diagnosis}")
    other = (*FIXED, *data_keys("NamedPoints"), f"data.batch_transform={named}", *fields)
    assert run(tmp_path / "b", *other, "stop_at_step=4")["steps"] == 4
    spread = weights(run(tmp_path / "b", *other, "resume=auto"))
    assert all(torch.allclose(tensor, spread[name], rtol=1e-11, atol=1e-13) for name, tensor in weights(alone).items())
    plain = weights(run(tmp_path / "c", *FIXED, "data=points"))
    assert not all(torch.allclose(tensor, plain[name]) for name, tensor in weights(alone).items())


@pytest.mark.slow
def test_weighted_samples_are_the_same_on_every_layout_and_the_summary_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (*FIXED, f"data.sampler={OWN}.weights")
    alone = run(tmp_path / "a", *settings, "data=points")
    assert "drawn by tests.support.own_data.weights: an epoch does not contain every sample" in capfd.readouterr().out
    fields = ("objective.input=voxels", "objective.target=diagnosis", "loader.num_workers=2", *MIRRORED)
    assert run(tmp_path / "b", *settings, *data_keys("NamedPoints"), *fields, "stop_at_step=4")["steps"] == 4
    spread = weights(run(tmp_path / "b", *settings, *data_keys("NamedPoints"), *fields, "resume=auto"))
    assert all(torch.allclose(tensor, spread[name], rtol=1e-11, atol=1e-13) for name, tensor in weights(alone).items())
    with pytest.raises(ConfigError, match=r"loader\.shuffle=false: has no effect: data\.sampler draws"):
        run(tmp_path / "c", *settings, "data=points", "loader.shuffle=false")
    with pytest.raises(ConfigError, match=r"data\.sampler=.*weights: an iterable dataset has its own order"):
        run(tmp_path / "d", *settings, "data=stream_of_points")


BASE: Final = Case(global_size=16, micro_size=4, num_steps=4, rate_scale=0.3, resume_at=2)
OBJECTIVES: Final = ("two_terms", "taught", "gradient_penalty", "weight_penalty")


def refusals(case: Case) -> list[str]:
    context = PlanContext(objective=TASKS[case.task].objective())
    return [str(problem) for problem in case.make_strategy().access_problems(context)]


def check(case: Case, pool: Pool) -> None:
    expected = oracle(case).model.state_dict()
    for rank in train(pool, case):
        weights = {name: rank.weights[name] for name in expected}
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", OBJECTIVES)
@pytest.mark.parametrize("strategy", PLACES)
def test_an_objective_of_ones_own_is_a_plain_loops_or_refused(strategy: str, task: str, pool: Pool) -> None:
    case = replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy])
    needed = needs_of(TASKS[task].objective())
    if refused := refusals(case):
        assert strategy == "pipeline" or (strategy == "fsdp" and task.endswith("penalty"))
        assert needed
        assert "Use " in refused[0]
        return
    check(case, pool)


@pytest.mark.parametrize(
    ("strategy", "returns"), [(name, "dict") for name in PLACES] + [("fsdp", "tuple"), ("fsdp", "dataclass")]
)
def test_a_model_of_several_outputs_is_that_of_one_device(strategy: str, returns: str, pool: Pool) -> None:
    settings = PLACES[strategy]
    check(replace(BASE, task="two_heads", model={"returns": returns}, strategy=strategy, settings=settings), pool)


def test_the_problem_names_what_the_objective_needs_and_what_to_choose() -> None:
    (text,) = refusals(replace(BASE, task="gradient_penalty", strategy="fsdp", settings={"replicas": 2}))
    assert text.startswith("objective=GradientPenalty: differentiates the model by its inputs, and fsdp reshards param")
    assert text.endswith("Use strategy=mirrored, whose replicas are unsharded.")
    assert refusals(replace(BASE, task="gradient_penalty", strategy="fsdp", settings={"replicas": 1})) == []
    settings = {"degree": 2, "replicas": 1}
    (text,) = refusals(replace(BASE, task="weight_penalty", strategy="tensor_parallel", settings=settings))
    assert text.startswith("objective=WeightPenalty: reads the parameters of the model, and each rank of tensor_para")


def test_a_parameter_server_refuses_to_read_parameters_of_sparse_tables() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    context = PlanContext(objective=TASKS["weight_penalty"].objective())
    (problem,) = ParameterServer().validate_model(model, context)
    assert "a worker has only the looked-up rows of a sparse table. Use strategy=mirrored" in str(problem)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [{name: row[name] for name in row if name.endswith(("/loss", "/labels", "/size"))} for row in rows(folder)]


TERMS = ("model=net", "data=points", "objective=two_terms", "batch.global_size=16", "batch.micro_size=4",
         "optimizer=sgd", "epochs=2", "log_every_steps=3", "eval.batch_size=4")  # fmt: skip
"""37 points: the last batch of an epoch and the last of the evaluation are short."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The rows of one device."""
    run(folder := tmp_path_factory.mktemp("one"), *TERMS)
    return rows_of(folder)


@pytest.mark.parametrize("strategy", [name for name in PLACES if name != "one_device"])
@pytest.mark.slow
def test_terms_are_logged_as_their_means_over_all_targets(
    strategy: str, expected: list[dict[str, float]], tmp_path: Path
) -> None:
    settings = [f"strategy.{key}={value}" for key, value in PLACES[strategy].items()]
    run(tmp_path, *TERMS, f"strategy={strategy}", *settings)
    logged = rows_of(tmp_path)
    assert len(expected) == len(logged) == 4
    for row, actual in zip(expected, logged, strict=True):
        assert actual == pytest.approx(row, rel=1e-12)
        split = next(iter(row)).partition("/")[0]
        assert row[f"{split}/labels"] + 0.1 * row[f"{split}/size"] == pytest.approx(row[f"{split}/loss"], rel=1e-12)


CALLED = (
    "model=net", "data=points", "objective=classification", "optimizer=sgd", "batch.global_size=16",
    "batch.micro_size=4", "steps=6", "log_every_steps=2", "eval.batch_size=4",
)  # fmt: skip


def test_a_callback_that_fails_is_named_with_its_hook(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        run(tmp_path / "run", *CALLED, "callbacks=[fails]")
    named = "in the callback tests.support.own_callbacks.Fails, hook step_end"
    assert named in caught.value.__notes__
    assert result_of(tmp_path / "run")["reason"] == f"ValueError: no such thing\nin two lines ({named})"
    assert result_of(tmp_path / "run")["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_an_observer_that_fails_is_left_out_and_the_run_goes_on(strategy: str, tmp_path: Path) -> None:
    same = (*CALLED, f"strategy={strategy}", "callbacks=[watches]", "callbacks.watches.hook=log")
    result = run(tmp_path / "run", *same)
    assert (result["status"], result["steps"]) == ("finished", 6)
    assert result["callback_errors"] == [
        {
            "callback": "tests.support.own_callbacks.Watches",
            "hook": "log",
            "error": "ValueError: no such thing\nin two lines",
        }
    ]


def test_an_observer_ends_the_run_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        run(tmp_path / "run", *CALLED, "callbacks=[watches]", "observer_errors=stop")


@pytest.mark.slow
def test_a_rank_of_several_names_the_callback_too(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"in the callback tests\.support\.own_callbacks\.Fails, hook step_end"):
        run(tmp_path / "run", *CALLED, "callbacks=[fails]", "strategy=mirrored", "supervisor.max_restarts=0")


@pytest.mark.slow
def test_tensors_of_a_callback_are_restored_and_evaluating_changes_nothing(tmp_path: Path) -> None:
    same = (*CALLED, "callbacks=[averages]", "checkpoint.every_steps=3")
    plain = run(tmp_path / "plain", *CALLED)
    undisturbed = run(tmp_path / "whole", *same)
    run(tmp_path / "part", *same, "stop_at_step=3")
    resumed = run(tmp_path / "resumed", *same, f"resume={tmp_path / 'part'}")

    for name, expected in weights(plain).items():
        assert torch.equal(weights(undisturbed)[name], expected)
        assert torch.equal(weights(resumed)[name], expected)
    expected_state, state = load(Path(undisturbed["last"])), load(Path(resumed["last"]))
    names = [name for name in expected_state.tensors if name.startswith("callback/")]
    assert len(names) == 4
    assert all(torch.equal(state.tensors[name], expected_state.tensors[name]) for name in names)


@pytest.mark.slow
def test_what_a_callback_evaluates_is_the_same_on_every_placement(tmp_path: Path) -> None:
    rows = []
    for strategy in ("one_device", "fsdp"):
        keys = (f"strategy={strategy}", "callbacks=[averages]", "callbacks.averages.keeps=false")
        run(tmp_path / strategy, *CALLED, *keys)
        lines = (tmp_path / strategy / "averages.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    assert [row["step"] for row in rows[0]] == [2, 4, 6]
    for row, same in zip(*rows, strict=True):
        assert same == pytest.approx(row, rel=1e-12)


@pytest.mark.slow
def test_tensors_that_are_alike_are_kept_where_ranks_save_together(tmp_path: Path) -> None:
    same = (*CALLED, "callbacks=[counts]", "strategy=fsdp", "strategy.replicas=2")
    run(tmp_path / "part", *same, "stop_at_step=3")
    resumed = run(tmp_path / "resumed", *CALLED, "callbacks=[counts]", f"resume={tmp_path / 'part'}")
    assert load(Path(resumed["last"])).tensors["callback/tests.support.own_callbacks.Counts/count"] == 6


@pytest.mark.slow
def test_tensors_that_a_rank_holds_alone_are_refused(tmp_path: Path) -> None:
    text = "the state of the callback tests.support.own_callbacks.Averages holds other tensors on rank 1 than on rank 0"
    with pytest.raises(TrainingError, match=text):
        run(tmp_path / "run", *CALLED, "strategy=fsdp", "callbacks=[averages]", "supervisor.max_restarts=0")


def test_a_hook_of_one_rank_alone_cannot_evaluate(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"^val cannot be evaluated in checkpoint_saved: \S+ runs on only one"):
        run(tmp_path / "run", *CALLED, "callbacks=[fails]", "callbacks.fails.hook=checkpoint_saved")


needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

MEASURED = (
    "model=net", "data=points", "objective=classification", "optimizer=sgd", "batch.global_size=16",
    "batch.micro_size=4", "epochs=1", "eval.batch_size=4",
    "+objective.extra_metrics.confusion={_target_: trainkit.objectives.ConfusionMatrix, num_classes: 3}",
    "+objective.extra_metrics.each={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 3, average: none}",
    "+objective.extra_metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 3, average: macro}",
)  # fmt: skip


def tables_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tables.jsonl").read_text().splitlines()]


@needs_torchmetrics
@pytest.mark.long
def test_tables_are_the_same_on_every_placement(tmp_path: Path) -> None:
    """11 points in batches of 4: the ranks have 2 and 1, and the last batch is short."""
    results = {name: run(tmp_path / name, *MEASURED, f"strategy={name}") for name in ("one_device", "mirrored", "fsdp")}

    expected = tables_of(tmp_path / "one_device")
    assert [table["name"] for table in expected] == ["val/confusion", "val/each"]
    assert sum(count for _, *counts in expected[0]["rows"] for count in counts) == 11
    assert results["one_device"]["tables"]["val/confusion"]["rows"] == expected[0]["rows"]
    for name, result in results.items():
        assert tables_of(tmp_path / name) == expected
        assert result["tables"] == results["one_device"]["tables"]
        assert result["metrics"]["val/f1"] == results["one_device"]["metrics"]["val/f1"]


@needs_torchmetrics
@pytest.mark.slow
def test_a_table_cannot_be_the_monitored_metric(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.metric=val/confusion: no such metric"):
        run(tmp_path / "run", *MEASURED, "eval.metric=val/confusion")
    with pytest.raises(ConfigError, match=r"eval\.metric=val/each: is a table, not a number"):
        run(tmp_path / "run", *MEASURED, "eval.metric=val/each")


HERE = __name__
OVERFLOWS = ("precision=fp16_mixed", "precision.initial_scale=4e9", "batch.micro_size=2")
WRITING_PLACES = [
    (),
    ("strategy=fsdp", "strategy.replicas=2"),
    ("strategy=parameter_server",),
]


class Scaling(Net):
    """Scales its inputs, in place from a call on; never: by a new tensor."""

    def __init__(self, *, writes_from: float = 0.0) -> None:
        super().__init__()
        self.calls, self.writes_from = 0, writes_from

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs.mul_(2).sub_(1) if self.calls > self.writes_from else inputs * 2 - 1)


class ScalingGan(Gan):
    """Its discriminator scales the images, in place or by a new tensor."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__(latent=4, hidden=[8])
        self.writes = writes
        fill(self)

    def forward(self, x: Tensor, part: Literal["generator", "discriminator"] = "generator") -> Tensor:
        if part == "discriminator" and not x.requires_grad:
            x = x.mul_(0.5).add_(0.25) if self.writes else x * 0.5 + 0.25
        return super().forward(x, part)


@pytest.mark.parametrize("strategy", WRITING_PLACES, ids=lambda strategy: strategy[0] if strategy else "one_device")
@pytest.mark.slow
def test_a_step_that_overflowed_is_repeated_with_the_samples_as_they_were_read(
    strategy: tuple[str, ...], tmp_path: Path
) -> None:
    steps = ("data=points", "steps=4", "batch.global_size=8", "eval.every_epochs=null", *OVERFLOWS, *strategy)
    trained = [
        weights(run(tmp_path / str(k), *steps, f"model={{_target_: {HERE}.Scaling, writes_from: {k}}}"))
        for k in ((0, 1e9) if strategy else (0, 5, 1e9))
    ]
    for written in trained[:-1]:
        torch.testing.assert_close(written, trained[-1], rtol=0, atol=0)


@pytest.mark.slow
def test_each_phase_of_a_step_gets_the_samples_as_they_were_read(tmp_path: Path) -> None:
    keys = ["recipe=gan", "objective.latent=4", "epochs=null", "steps=4", "eval.every_epochs=null", "precision=fp32"]
    keys += ["optimizers.discriminator.ratio=2"]
    trained = [
        weights(run(tmp_path / str(writes), *keys, f"model={{_target_: {HERE}.ScalingGan, writes: {writes}}}"))
        for writes in (True, False)
    ]
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_a_loop_of_ones_own_repeats_a_step_with_what_it_has_written_itself(tmp_path: Path) -> None:
    trained = []
    for writes_from in (0.0, 1e9):
        keys = ["recipe=null", "steps=3", "batch.global_size=8", "eval.every_epochs=null", "callbacks=[]", *OVERFLOWS]
        model, folder = Scaling(writes_from=writes_from), tmp_path / str(writes_from)
        with trainkit.session(keys, model=model, data={"train": Points()}, run_dir=folder) as session:
            for shards in session.batches():
                for x, _ in shards:
                    x.add_(0.5)
                session.step()
            assert isinstance(session.model, Scaling)
            assert session.model.calls > 4  # one a step, one before the first, and the repeated ones
            trained.append({name: tensor.clone() for name, tensor in session.model.state_dict().items()})
    torch.testing.assert_close(*trained, rtol=0, atol=0)


CHANGING = (
    "data=points", "objective=classification", "optimizer=adamw", "batch.global_size=16", "batch.micro_size=4",
    "steps=6", "eval.batch_size=4",
)  # fmt: skip
CHANGED_UNDER = {
    **{name: (f"strategy={name}",) for name in ("one_device", "central_storage", "pipeline")},
    **{name: (f"strategy={name}", "strategy.replicas=2") for name in ("fsdp", "local_sgd")},
    "central_storage, async": ("strategy=central_storage", "strategy.mode=async"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CHANGED_UNDER)
def test_a_callback_that_unfreezes_or_freezes_ends_the_run_at_that_step(strategy: str, tmp_path: Path) -> None:
    model, how, value = ("net", "freeze", False) if strategy == "pipeline" else ("changes_itself", "unfreeze", True)
    changing = (f"model={model}", "callbacks=[changes_params]", f"callbacks.changes_params.how={how}")
    named = rf"after step 2, requires_grad of 0\.weight, 0\.bias was changed to {value} by .* init_from=RUN"
    with pytest.raises(TrainingError, match=named):
        run(tmp_path / "run", *CHANGING, *changing, *CHANGED_UNDER[strategy])


# one device, threads and ranks; the test above has all executors
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "central_storage", "fsdp"])
def test_a_forward_pass_that_unfreezes_ends_the_run(strategy: str, tmp_path: Path) -> None:
    changing = ("model=changes_itself", "model.how=unfreeze")
    with pytest.raises(TrainingError, match=r"requires_grad of 0\.(weight|bias), .* was changed to True"):
        run(tmp_path / "run", *CHANGING, *changing, *CHANGED_UNDER[strategy])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("freeze", r"requires_grad of 0\.weight, 0\.bias was changed to False"),
        ("replace", r"the parameter 2\.weight, 2\.bias was replaced"),
        ("add", r"the parameter 0\.scale was added"),
    ],
)
def test_other_changes_of_what_is_trained_end_the_run_too(how: str, text: str, tmp_path: Path) -> None:
    changing = ("model=net", "callbacks=[changes_params]", f"callbacks.changes_params.how={how}")
    with pytest.raises(TrainingError, match=f"after step 2, {text} by"):
        run(tmp_path / "run", *CHANGING, *changing)


@pytest.mark.slow
def test_a_resumed_run_ends_at_the_same_step(tmp_path: Path) -> None:
    changing = (*CHANGING, "model=changes_itself", "callbacks=[changes_params]", "checkpoint.every_steps=1")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"after step 2, requires_grad of"):
            run(tmp_path / "run", *changing, *(["resume=auto"] if (tmp_path / "run").exists() else []))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "unfreeze"])
def test_a_change_after_the_last_step_loses_nothing(how: str, tmp_path: Path) -> None:
    model = "net" if how == "freeze" else "changes_itself"
    changing = ("callbacks=[changes_params]", f"callbacks.changes_params.how={how}", "callbacks.changes_params.step=6")
    result = run(tmp_path / "run", *CHANGING, f"model={model}", *changing)
    plain = run(tmp_path / "plain", *CHANGING, f"model={model}")
    assert (result["status"], weights(result).keys()) == ("finished", weights(plain).keys())
    assert load(Path(result["last"])).tensors.keys() == load(Path(plain["last"])).tensors.keys()
    assert result["weights_sha256"] == plain["weights_sha256"]
