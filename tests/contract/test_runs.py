"""Whole runs against the oracle: config, data, loop and checkpoint together; averages of the weights are torch's.

A run whose config, data order, evaluation or log differs from the loop by hand although each step is right, and an
average that counts a step twice after a resume or is evaluated with other batch statistics are caught here alone.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import trainkit
from tests.contract.running import run, weights
from tests.support import reference, zoo
from tests.support.refusing import refused
from trainkit.adapters.average import AVERAGE, UPDATES, Ema, count_update
from trainkit.config.schema import load_resolved
from trainkit.errors import ConfigError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import make_plan
from trainkit.run.session.auxiliary import CheckpointEvaluator
from trainkit.strategies.central_storage import AsyncCentralExecutor
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.trainer.checkpoint.tensors import load

POINTS = ("model=net", "data=points", "batch.global_size=16", "batch.micro_size=5")


def points_oracle(**settings: Any) -> reference.Trained:
    data = zoo.Points()
    fixed: dict[str, Any] = {"model": zoo.Net(), "optimizer": reference.sgd(), "rate": lambda _: 0.1, "num_steps": 9}
    samples = [data[index] for index in range(37)]
    return reference.train(samples=samples, loss_sum=zoo.classes_sum, global_size=16, seed=3, **(fixed | settings))


def read(folder: Path) -> list[int]:
    """Every training index that a process of the run read, in order."""
    return [int(line) for path in sorted(folder.glob("read_*")) for line in path.read_text().split()]


@pytest.mark.slow
def test_a_run_with_everything_on_is_that_of_the_reference(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", *POINTS, "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "epochs=3",
        "lr_scaling.reference_batch=8", "warmup.steps=3", "schedule=linear", "clip.max_norm=0.05",
    )  # fmt: skip
    climb, fall = [0.02 / 3, 0.04 / 3, 0.02], [0.02 * (1 - step / 6) for step in range(6)]
    expected = points_oracle(
        optimizer=reference.adamw(weight_decay=0.1, no_decay=lambda name: name.endswith("bias")),
        rate=(climb + fall).__getitem__,
        max_norm=0.05,
    )
    assert result["steps"] == 9
    assert reference.differences(weights(result), expected) == []


@pytest.mark.slow
def test_samples_read_one_at_a_time_give_the_bits_of_those_in_memory(tmp_path: Path) -> None:
    fixed = ("model=net", "batch.global_size=16", "batch.micro_size=5", "optimizer=sgd", "epochs=3")
    in_memory = run(tmp_path / "a", *fixed, "data=points")
    one_by_one = run(tmp_path / "b", *fixed, "data=recorded", f"data.folder={tmp_path}")
    assert one_by_one["weights_sha256"] == in_memory["weights_sha256"]
    assert one_by_one["metrics"]["val/loss"] == in_memory["metrics"]["val/loss"]
    orders = [reference.order(37, seed=3, epoch=epoch) for epoch in range(3)]
    assert read(tmp_path)[-111:] == [index for order in orders for index in order]


@pytest.mark.slow
def test_a_run_continued_in_the_middle_of_an_epoch_reads_on_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    fixed = ("model=net", "model.norm=true", "model.dropout=0.2", "batch.global_size=16", "batch.micro_size=5",
             "optimizer=adamw", "epochs=3", "data=recorded")  # fmt: skip
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    undisturbed = run(tmp_path / "a", *fixed, f"data.folder={tmp_path / 'whole'}")
    parts = (*fixed, f"data.folder={tmp_path / 'parts'}")
    first = run(tmp_path / "b", *parts, "stop_at_step=4")
    assert (first["status"], first["steps"]) == ("stopped", 4)
    second = run(tmp_path / "b", *parts, "resume=auto")
    assert second["weights_sha256"] == undisturbed["weights_sha256"]
    orders = [index for epoch in range(3) for index in reference.order(37, seed=3, epoch=epoch)]
    # four steps: an epoch of 37 and a batch of 16
    assert read(tmp_path / "parts")[-58:] == orders[-58:]


@pytest.mark.slow
def test_evaluation_counts_every_sample_once_whatever_its_batches(tmp_path: Path) -> None:
    fixed = (*POINTS, "optimizer=sgd", "steps=3", "schedule=constant", "optimizer.lr=0.1")
    data, model = zoo.Points("val"), points_oracle(num_steps=3).model
    with torch.no_grad():
        outputs = model(data.inputs.double())
    expected = float(torch.nn.functional.cross_entropy(outputs, data.targets))
    for batch_size in (4, 11, 256):
        metrics = run(tmp_path / f"{batch_size}", *fixed, f"eval.batch_size={batch_size}")["metrics"]
        assert metrics["val/loss"] == pytest.approx(expected, rel=1e-12)
        assert metrics["val/accuracy"] == int((outputs.argmax(1) == data.targets).sum()) / 11


def val_loss(model: nn.Module) -> float:
    """Of the 11 points of the split, at once."""
    data = zoo.Points("val")
    with torch.no_grad():
        return functional.cross_entropy(model(data.inputs.double()), data.targets).item()


def test_evaluation_draws_no_dropout_and_leaves_batch_statistics_alone(tmp_path: Path) -> None:
    model = ("model=net", "model.dropout=0.5", "model.norm=true")
    result = run(tmp_path, *POINTS[1:], *model, "optimizer=sgd", "optimizer.lr=1e-300", "steps=3", "eval.every_steps=1")
    expected = points_oracle(model=zoo.Net(norm=True), rate=lambda _: 0.0, num_steps=3, micro_size=5).model.eval()
    assert result["metrics"]["val/loss"] == pytest.approx(val_loss(expected), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_is_trained_in_training_mode_from_the_first_step(frozen: bool, tmp_path: Path) -> None:
    model = ("model=null", "model._target_=tests.support.zoo.Modes", f"model.frozen={str(frozen).lower()}")
    result = run(tmp_path, *POINTS[1:], *model, "optimizer=sgd", "optimizer.lr=0.1", "schedule=constant", "steps=3",
               "eval.every_steps=2", "average=swa", "eval.batch_size=16")  # fmt: skip
    expected = points_oracle(model=zoo.Modes(frozen=frozen), num_steps=3, micro_size=5)
    assert reference.differences(weights(result), expected) == []
    counted = load(Path(result["last"])).tensors["optimizer/average/1.running_mean"]
    assert bool((counted == 0.5).all()) is frozen  # frozen statistics are not counted again


def test_synchronised_batch_statistics_are_refused_for_several_copies(tmp_path: Path) -> None:
    model = "model={_target_: torch.nn.SyncBatchNorm, num_features: 6}"
    with pytest.raises(ConfigError, match=r"is a SyncBatchNorm, and batch statistics are those of a shard on any"):
        run(tmp_path, model, *POINTS[1:], "strategy=mirrored", "strategy.replicas=2")


@pytest.mark.parametrize(
    ("setting", "of_layer"),
    [("strategy=fsdp", False), ("strategy=parameter_server", False), ("compile.mode=default", False),
     ("strategy=pipeline", True)],
)  # fmt: skip
def test_a_hook_on_a_gradient_that_a_run_does_not_call_is_refused(setting: str, of_layer: bool, tmp_path: Path) -> None:
    model = ("model=null", "model._target_=tests.support.zoo.Hooked", f"model.of_layer={str(of_layer).lower()}")
    with pytest.raises(ConfigError, match=r"model: (0.weight|2) has a (hook on its gradient|backward hook), which"):
        run(tmp_path, *model, *POINTS[1:], setting)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [("strategy=mirrored", "strategy.replicas=2"), ("strategy=central_storage",)])
def test_a_weight_that_a_forward_pass_changes_is_refused_for_several_copies(
    strategy: tuple[str, ...], tmp_path: Path
) -> None:
    model = "model={_target_: torch.nn.Embedding, num_embeddings: 11, embedding_dim: 11, max_norm: 1.0}"
    fixed = (model, "data=sentences", "objective=language_modelling", "optimizer=sgd", "batch.global_size=8", "steps=1")
    assert run(tmp_path / "one", *fixed)["steps"] == 1
    with pytest.raises(ConfigError, match=r"model: Embedding\(11, 11, max_norm=1.0\) changes its weight"):
        run(tmp_path / "run", *fixed, *strategy)


@pytest.mark.slow
def test_augmentation_is_keyed_by_epoch_and_sample(tmp_path: Path) -> None:
    fixed = ("model=net", "data=noisy", f"data.folder={tmp_path}", "optimizer=sgd", "epochs=2", "batch.micro_size=5")
    run(tmp_path / "a", *fixed, "batch.global_size=16")
    first = noise_of_two_epochs(tmp_path)
    run(tmp_path / "b", *fixed, "batch.global_size=10")
    assert noise_of_two_epochs(tmp_path) == first
    assert len(set(first[0].values()) | set(first[1].values())) == 2 * 37


def noise_of_two_epochs(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Sample -> the noise it got, for each of the last two epochs that were read."""
    lines = [line.split() for path in folder.glob("noise_*") for line in path.read_text().splitlines()][-74:]
    return dict(lines[:37]), dict(lines[37:])


def test_the_logged_loss_is_that_of_the_whole_step(tmp_path: Path) -> None:
    import json

    run(tmp_path, *POINTS, "optimizer=sgd", "steps=3", "schedule=constant", "optimizer.lr=0.1", "log_every_steps=1",
        "eval.every_epochs=null")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == pytest.approx(points_oracle(num_steps=3).losses, rel=1e-12)


AVERAGED = (
    "model=net", "model.width=8", "data=points", "batch.global_size=16", "batch.micro_size=4", "optimizer=adamw",
    "optimizer.lr=0.05", "steps=7", "average=ema", "average.decay=0.7",
)  # fmt: skip
NORM = (*AVERAGED[:-2], "model.norm=true", "eval.batch_size=8", "optimizer=sgd")
"""The true gradient of a bias before batch statistics is zero, which Adam would divide by its own rounding error."""
SWA = (*NORM, "average=swa", "average.start_step=3")
PLACES = {
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2", "strategy.replicas=1"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=2"),
    "central_storage": ("strategy=central_storage", "strategy.compute_devices=[cpu,cpu]"),
    "tensor_parallel": (
        "strategy=tensor_parallel", "strategy.degree=2", "strategy.replicas=1", "strategy.plan={0:colwise,2:rowwise}",
    ),
    "mesh": ("strategy=mesh", "strategy.shard=2", "strategy.tensor=2", "strategy.plan={0:colwise,2:rowwise}"),
}  # fmt: skip
ASYNC = ("strategy=central_storage", "strategy.mode=async", "strategy.compute_devices=[cpu,cpu]")
EMA: Any = get_ema_multi_avg_fn(0.7)  # type: ignore[no-untyped-call]
MEAN: Any = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]


def averages(result: dict[str, Any]) -> dict[str, Tensor]:
    """The averages in the last checkpoint, by parameter."""
    tensors = load(Path(result["last"])).tensors
    return {key.split("/", 2)[2]: tensors[key] for key in tensors if key.startswith("optimizer/average/")}


def assert_counted(model: nn.Module) -> None:
    """Hold the batch statistics of a model to what torch counts over the training data."""
    data, counted = zoo.Points().inputs.double(), copy.deepcopy(model)
    update_bn([data[start : start + 8] for start in range(0, len(data), 8)], counted)
    torch.testing.assert_close(model.state_dict(), counted.state_dict(), rtol=1e-12, atol=1e-14)


def averaged_by_hand(folder: Path, kind: Any, steps: range) -> dict[str, Tensor]:
    """What torch's AveragedModel holds after the checkpoints of these steps."""
    model = trainkit.load(folder)
    averaged = AveragedModel(model, multi_avg_fn=kind)
    for step in steps:
        averaged.update_parameters(trainkit.load(folder / f"checkpoints/step_{step:08d}"))
    return {name: tensor.detach() for name, tensor in averaged.module.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "kind", "steps"),
    [
        ((), EMA, range(1, 8)),
        (("average.start_step=3", "average.every_steps=2"), EMA, range(3, 8, 2)),
        (("average=swa", "average.start_step=4"), MEAN, range(4, 8)),
        (ASYNC, EMA, range(1, 8)),
    ],
)
@pytest.mark.slow
def test_an_average_is_that_of_torch(tmp_path: Path, settings: tuple[str, ...], kind: Any, steps: range) -> None:
    points = AVERAGED[:-1] if "average=swa" in settings else AVERAGED
    result = run(tmp_path / "run", *points, *settings, "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    expected = averaged_by_hand(tmp_path / "run", kind, steps)  # torch divides by the number of values in float32
    torch.testing.assert_close(averages(result), expected, rtol=1e-7, atol=1e-9)


def test_an_optimizer_whose_averages_another_one_counts_makes_its_first_step_as_ever() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, plain = torch.optim.AdamW([weight]), torch.optim.AdamW([other])
    Ema(decay=0.5).attach(optimizer)
    count_update([optimizer], [weight])
    weight.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    plain.step()
    slots = optimizer.state[weight]
    assert slots.pop(UPDATES) == 2
    torch.testing.assert_close(slots.pop(AVERAGE), (1 + other.detach()) / 2)
    torch.testing.assert_close(slots, plain.state[other], rtol=0, atol=0)


def test_a_step_that_fails_leaves_the_averages_in_their_slots() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    Ema(decay=0.5).attach(optimizer)
    count_update([optimizer], [weight])
    optimizer.register_step_pre_hook(Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        OptimizerStepper(optimizer, [weight]).step([torch.ones(2)], 1.0)
    assert (optimizer.state[weight].keys(), weight.grad) == ({AVERAGE, UPDATES}, None)


def test_averages_that_cannot_be_shown_leave_the_variables_to_the_copies() -> None:
    variables = Mock(swap_averages=Mock(side_effect=MemoryError))
    executor = Mock(_lock=Lock(), _shows_averages=False, _variables=variables, _steppers=[None])
    with pytest.raises(MemoryError):
        AsyncCentralExecutor.swap_averages(executor)
    assert not executor._lock.locked()


@pytest.mark.slow
def test_averages_count_though_the_copy_that_keeps_them_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = AsyncCentralExecutor._compute_step

    def slow(self: Any, work: Any) -> Any:
        time.sleep(0.05 if work.replica is self._copies.copies[0] else 0.0)
        return computed(self, work)

    monkeypatch.setattr(AsyncCentralExecutor, "_compute_step", slow)
    test_an_average_is_that_of_torch(tmp_path, ASYNC, EMA, range(1, 8))
    # the first update is that of the other copy: a single one, which has the slots of the first, finds averages alone
    single = (*ASYNC[:2], "strategy.compute_devices=[cpu]", f"resume={tmp_path}/run/checkpoints/step_00000001")
    resumed = run(tmp_path / "single", *AVERAGED, *single)
    tensors = load(Path(resumed["last"])).tensors
    assert int(tensors["optimizer/average_updates/0.weight"]) == 7
    assert float(tensors["optimizer/step/0.weight"]) == 6


@pytest.mark.slow
def test_an_average_changes_no_weight_and_is_evaluated_beside_them(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", *AVERAGED[:-2])
    result = run(tmp_path / "run", *AVERAGED, "eval.metric=val_ema/loss")
    assert result["weights_sha256"] == plain["weights_sha256"]
    assert result["fingerprint"] != plain["fingerprint"]
    assert plain["metrics"].items() <= result["metrics"].items()
    assert result["metrics"].keys() - plain["metrics"].keys() == {"val_ema/loss", "val_ema/accuracy"}
    assert result["metrics"]["val_ema/loss"] != result["metrics"]["val/loss"]


@pytest.mark.slow
def test_an_average_of_a_model_with_batch_statistics_is_evaluated_with_those_of_the_training(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *NORM, "average=ema", "average.decay=0.7")
    model = trainkit.load(tmp_path / "run/model/average")
    assert torch.equal(model.state_dict()["1.running_mean"], weights(result)["1.running_mean"])
    assert result["metrics"]["val_ema/loss"] == pytest.approx(val_loss(model), rel=1e-12)
    assert weights(result)["1.running_mean"].equal(weights(run(tmp_path / "plain", *NORM))["1.running_mean"])


@pytest.mark.parametrize("points", [AVERAGED, SWA], ids=["ema", "swa"])
@pytest.mark.slow
def test_an_evaluator_beside_the_training_finds_the_same_figures(points: tuple[str, ...], tmp_path: Path) -> None:
    result = run(tmp_path / "run", *points)
    folder = RunFolder(tmp_path / "run")
    plan = make_plan(load_resolved(folder.resolved))
    evaluator = CheckpointEvaluator(plan, folder, device="cpu", on_phase=lambda *_: None)
    rows = list(iter(evaluator.evaluate_next, None))
    evaluator.close()
    assert result["metrics"].items() <= rows[-1].items()


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(strategy, marks=() if strategy == "central_storage" else pytest.mark.long) for strategy in PLACES],
)
@pytest.mark.slow
def test_an_average_of_any_strategy_is_that_of_one_device_stopped_and_resumed(strategy: str, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", *AVERAGED)
    run(tmp_path / "run", *AVERAGED, *PLACES[strategy], "stop_at_step=4")
    result = run(tmp_path / "resumed", *AVERAGED, *PLACES[strategy], f"resume={tmp_path}/run")
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    torch.testing.assert_close(averages(result), averages(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weights(result), weights(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_averaged_weights_are_exported_by_choice(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *AVERAGED)
    exported = load_file(tmp_path / "run/model/average/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in averages(result).items())
    model = trainkit.load(tmp_path / "run/model/average")
    assert torch.equal(model.state_dict()["0.weight"], averages(result)["0.weight"])
    run(tmp_path / "other", *AVERAGED, "average.export=false")
    assert not (tmp_path / "other/model/average").exists()


@pytest.mark.slow
def test_batch_statistics_of_a_mean_of_weights_are_counted_over_the_training_data(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *SWA)
    model = trainkit.load(tmp_path / "run/model/average")
    assert_counted(model)
    assert result["metrics"]["val_swa/loss"] == pytest.approx(val_loss(model), rel=1e-12)
    raw = trainkit.load(tmp_path / "run").state_dict()["1.running_mean"]
    assert torch.equal(raw, weights(run(tmp_path / "plain", *NORM))["1.running_mean"])


@pytest.mark.slow
def test_counting_batch_statistics_changes_no_other_buffer(tmp_path: Path) -> None:
    stepped = (*SWA, "model._target_=tests.support.zoo.Stepped")
    assert int(weights(run(tmp_path / "run", *stepped, "stop_at_step=4"))["steps"]) == 4  # which a resume continues


@pytest.mark.parametrize("strategy", [(), pytest.param(PLACES["mirrored"], marks=pytest.mark.long)], ids=["one", "two"])
@pytest.mark.slow
def test_batch_statistics_are_counted_over_a_whole_stream_which_then_resumes_where_it_was(
    strategy: tuple[str, ...], tmp_path: Path
) -> None:
    stream = (*SWA, "average.start_step=1", "data={_target_: tests.support.own_data.SavedPointStream}", *strategy)
    stopped = run(tmp_path / "run", *stream, "stop_at_step=4")
    model = trainkit.load(stopped["last"])
    model.load_state_dict({**model.state_dict(), **averages(stopped)})
    assert_counted(model)
    undisturbed = run(tmp_path / "whole", *stream)
    assert run(tmp_path / "run", *stream, "resume=auto")["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_counted_batch_statistics_of_any_strategy_are_those_of_one_device(strategy: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", *SWA)
    run(tmp_path / "run", *SWA, *PLACES[strategy])
    bits = [
        run(tmp_path / f"{len(keys)}", *SWA, *keys, "numerics.reproducible=true") for keys in ((), PLACES[strategy])
    ]
    assert all(tensor.equal(averages(bits[1])[name]) for name, tensor in averages(bits[0]).items())
    expected, actual = (load_file(tmp_path / name / "model/average/model.safetensors") for name in ("whole", "run"))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


LOCAL = ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=2")


@pytest.mark.parametrize(("settings", "key", "word"), [
    (("average=swa", *PLACES["pipeline"], "model.norm=true"), "average=swa", "a rank of a pipeline has those of its"),
    (("average=swa", "model.norm=true", "eval.batch_size=12"), "eval.batch_size=12", "(BatchNorm1d). Use 13."),
    (("average.start_step=8",), "average.start_step=8", "is after the last step: the run has 7"),
    (LOCAL, "average", "and those of local_sgd differ"),
    (("average.decay=1.0",), "average.decay=1.0", "must be at least 0 and less than 1."),
])  # fmt: skip
def test_an_average_that_cannot_be_kept_is_refused(
    tmp_path: Path, settings: tuple[str, ...], key: str, word: str
) -> None:
    points = AVERAGED[:-2] if "average=swa" in settings else AVERAGED
    problems = refused(run, tmp_path / "run", *points, *settings)
    assert any(problem.startswith(f"{key}: ") and word in problem for problem in problems)
