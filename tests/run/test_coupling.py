"""A model that draws or couples samples and is said to train alike on any number of replicas is caught here alone.
A training whose result shows the proof of another training or placement is caught here alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit import api
from trainkit.cli import main
from trainkit.config.compose import compose
from trainkit.config.schema import RunConfig
from trainkit.models.mlp import Mlp
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.objectives.classification import Classification
from trainkit.objectives.fields import split_batch
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.prove.comparing import Sameness, same_training
from trainkit.run.planning import notes as cut_facts
from trainkit.run.planning.notes import COUPLES, MODEL, Coupling, coupling_of, cut_notes, probe
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.planning.proof_records import keep_proof, key_of, last_proof, proofs_folder

DRAWS = "draws random numbers"


def samples(count: int = 8) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=generator), index % 3) for index in range(count)]


def mlp(**settings: object) -> Mlp:
    return Mlp(in_features=6, hidden=[8], out_features=3, **settings)  # type: ignore[arg-type]


class Changed(nn.Module):
    """An MLP whose outputs go through a function."""

    mean: Tensor

    def __init__(self, change: Callable[[Changed, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = mlp(), change
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.change(self, self.inner(inputs))


def keeping(statistic: Callable[[Tensor], Tensor]) -> Callable[[Changed, Tensor], Tensor]:
    def change(model: Changed, outputs: Tensor) -> Tensor:
        model.mean.mul_(0.9).add_(0.1 * statistic(outputs.detach()))
        return outputs

    return change


def counting(model: Changed, outputs: Tensor) -> Tensor:
    model.calls += 1
    return outputs * model.calls


@pytest.mark.parametrize(
    ("model", "coupling"),
    [
        (mlp(), ""),
        (mlp(dropout=0.2), f"the model {DRAWS}"),
        (mlp(batch_norm=True), f"the model {COUPLES}"),
        (mlp(batch_norm=True).eval(), ""),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))), ""),
        (Changed(lambda _, y: y - y.mean(0)), f"the model {COUPLES}"),
        (Changed(lambda model, y: y - model.gate * y.mean(0)), f"the model {COUPLES}"),
        (Changed(lambda _, y: y * random.random()), f"the model {DRAWS}"),
        (Changed(counting), "the model or the objective returns different numbers when it runs again"),
        (Changed(keeping(lambda y: y.mean(0))), ""),
        (Changed(keeping(lambda y: y.sum(0))), "the model keeps statistics of a shard in its buffers"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_models(model: nn.Module, coupling: str) -> None:
    assert probe(model, Classification(), samples()).text == coupling


def losing(score: Callable[[Any, Tensor, Tensor], Loss]) -> Objective:
    class Own(Objective):
        def loss(self, model: Model, batch: object) -> Loss:
            return score(model, *split_batch(batch))

    return Own()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Loss:
    return Loss(functional.cross_entropy(outputs, targets, reduction="sum"), float(len(targets)))


def contrastive(outputs: Tensor) -> Loss:
    directions = functional.normalize(outputs)
    return cross_entropy(directions @ directions.T, torch.arange(len(directions)))


def with_auxiliary_loss(model: Model, x: Tensor, y: Tensor) -> Loss:
    loss = cross_entropy(model(x), y)
    loss.extra = 0.01 * model.layers[0](x).mean(0).square().sum()  # type: ignore[attr-defined]
    return loss


@pytest.mark.parametrize(
    ("objective", "coupling"),
    [
        (Classification(class_weights=[1.0, 2.0, 7.0], label_smoothing=0.1), ""),
        (losing(lambda model, x, y: cross_entropy(model(x + torch.randn_like(x)), y)), f"the objective {DRAWS}"),
        (losing(with_auxiliary_loss), f"the objective {COUPLES}"),
        (losing(lambda model, x, y: cross_entropy(model.layers(x), y)), ""),
        (losing(lambda model, x, _: contrastive(model.layers(x))), f"the model or the objective {COUPLES}"),
    ],
    ids=["weighted", "noise", "auxiliary", "inside", "contrastive_inside"],
)
def test_objectives(objective: Objective, coupling: str) -> None:
    assert probe(mlp(), objective, samples()).text == coupling


class Reporting(nn.Module):
    """A model that reports the mean loss of its targets, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 7), nn.Linear(7, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(count: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        ids = torch.randint(5, (9,), generator=generator)
        yield ids, ids.where(torch.arange(9) >= index, -100)  # of each sample another number of targets counts


def test_a_mean_over_unequal_numbers_of_targets_does_not_couple() -> None:
    batch = [{"ids": ids, "labels": labels} for ids, labels in tokens()]
    assert probe(Reporting(), ModelComputesLoss(), batch) == Coupling()
    assert probe(nn.Sequential(nn.Embedding(5, 5)), LanguageModelling(), list(tokens())) == Coupling()


def test_generators_are_left_as_they_were() -> None:
    model = mlp(dropout=0.5)
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    probe(model, Classification(), samples())
    assert (torch.rand(1), random.random()) == expected


def test_samples_that_are_all_alike_show_nothing_and_two_that_differ_are_enough() -> None:
    assert probe(mlp(), Classification(), samples(1) * 8).not_probed == "the samples that were tried are all equal"
    assert probe(Changed(lambda _, y: y - y.mean(0)), Classification(), samples(4)).text == f"the model {COUPLES}"


DRAWING = ("recipe=digits", "model.dropout=0.2", "batch.global_size=60")
NOTE = "the model draws random numbers: on another number of replicas it is the same training only at an equal "


def plan_of(*arguments: str) -> RunPlan:
    return make_plan(RunConfig.from_dict(compose(arguments).values))


def test_nothing_is_run_where_the_cut_does_not_follow_the_replicas() -> None:
    for more in ("batch.micro_size=30", "numerics.reproducible=true", "strategy=local_sgd"):
        assert cut_notes(plan_of(*DRAWING, more), never_called) == []


def test_a_large_model_is_not_run_before_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_facts, "_CHEAP", 9_000)
    plan, model = plan_of(*DRAWING), nn.Linear(100, 100)
    why = "coupling: not probed, the model has 10,100 parameters, more than 9,000: trainkit prove probes it."
    assert cut_notes(plan, lambda: coupling_of(plan, model)) == [why]
    assert coupling_of(plan, model, at_any_size=True).text == "the model draws random numbers"


def test_a_model_that_cannot_be_run_is_reported_as_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Coupling:
        raise RuntimeError("not four at a time")

    monkeypatch.setattr(cut_facts, "probe", fails)
    why = "a pass on the CPU failed (RuntimeError: not four at a time)"
    assert coupling_of(plan_of(*DRAWING), nn.Linear(64, 10)).not_probed == why


class Ragged:
    """Samples of many lengths; every `alike`-th has the same."""

    def __init__(self, alike: int) -> None:
        self.alike = alike

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6 if index % self.alike == 0 else 100 + index), index


def test_samples_of_one_shape_are_looked_for() -> None:
    same_shape = cut_facts._samples_of_one_shape(Ragged(alike=4))
    assert not isinstance(same_shape, str)
    assert [inputs.shape for inputs, _ in same_shape] == [(6,)] * 8
    assert len({index for _, index in same_shape}) == 8
    why = "there are not 4 samples of one shape among the first 32"
    assert cut_facts._samples_of_one_shape(Ragged(alike=32)) == why


@pytest.mark.slow
def test_plan_and_train_print_the_same_note_and_the_training_is_not_disturbed(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*DRAWING, "model.batch_norm=true", "stop_at_step=2"]
    assert main(["plan", *DRAWING]) == 0
    assert f"  note: {NOTE}" in capsys.readouterr().out
    probed = api.train(api.compose(short))
    assert "note: the model draws random numbers" in capsys.readouterr().out
    monkeypatch.setattr("trainkit.run.begin.cut_notes", lambda *_: [])
    assert api.train(api.compose(short))["weights_sha256"] == probed["weights_sha256"]


NOTHING, COUPLED = Coupling(), Coupling(findings=((MODEL, COUPLES),))


def never_called() -> Coupling:
    raise AssertionError("the model was run where the cut cannot matter")


def sameness(*arguments: str, coupling: Callable[[], Coupling] = never_called, base: tuple[str, ...] = ()) -> Sameness:
    reference, candidate = (
        make_plan(RunConfig.from_dict(compose(["recipe=digits", *base, *more]).values)) for more in ((), arguments)
    )
    return same_training(reference, candidate, coupling, accumulates="batch.accumulation=2" in base)


@pytest.mark.slow
def test_an_equal_cut_is_the_same_training_whatever_the_model_is() -> None:
    assert sameness("strategy=device_map").verdict == "yes"
    assert sameness("strategy=mirrored", "strategy.replicas=1").verdict == "yes"
    other = ("strategy=fsdp", "loader.num_workers=2", "eval.batch_size=7", "name=other")
    assert sameness(*other, base=("batch.micro_size=32",)).verdict == "yes"
    assert sameness("strategy=mirrored", base=("numerics.reproducible=true",)).verdict == "yes"


@pytest.mark.slow
def test_another_cut_matters_to_a_model_that_couples_samples() -> None:
    arguments = "strategy=mirrored", "strategy.replicas=4"
    assert sameness(*arguments, coupling=lambda: NOTHING).verdict == "yes"
    answer = sameness(*arguments, coupling=lambda: COUPLED)
    assert (answer.verdict, answer.remedy) == ("no", "batch.micro_size=16")
    assert sameness(*arguments, base=("batch.micro_size=16",)).verdict == "yes"  # the remedy, pasted


def test_the_remedy_takes_the_place_of_accumulation() -> None:
    answer = sameness("strategy=mirrored", coupling=lambda: COUPLED, base=("batch.accumulation=2",))
    assert answer.remedy == "batch.micro_size=16 instead of batch.accumulation"


def test_an_unknown_coupling_gives_an_unknown_verdict() -> None:
    answer = sameness("strategy=mirrored", coupling=lambda: Coupling(not_probed="it is too large"))
    why = "batch.micro_size is 32 here and 64 under one_device; coupling: not probed, it is too large"
    assert answer == Sameness(verdict="unknown", reasons=(why,), remedy="batch.micro_size=32")


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["strategy=mirrored", "strategy.compression=bf16", "optimizer.lr=0.5"],
         ["optimizer.lr is 0.5 here and 0.01 under one_device", "strategy.compression=bf16 counts as maths"]),
        (["strategy=local_sgd"], ["this strategy is a different training from that of one_device"]),
        (["strategy=parameter_server", "strategy.mode=async"], ["strategy.mode=async counts as maths"]),
    ],
)  # fmt: skip
def test_keys_that_change_the_result_are_named_and_no_cut_helps(arguments: list[str], reasons: list[str]) -> None:
    answer = sameness(*arguments)
    assert (answer.verdict, answer.remedy) == ("no", None)
    assert all(reason.startswith(start) for reason, start in zip(answer.reasons, reasons, strict=True))


def test_a_batch_that_follows_the_replicas_is_another_training() -> None:
    base = ("batch.global_size=null", "batch.micro_size=8", "batch.accumulation=2")
    assert sameness("strategy=mirrored", base=base).reasons == ("batch.global_size is 32 here and 16 under one_device",)


FOUND = {
    "command": "trainkit prove strategy=mirrored", "same_training": "yes", "same_numbers": "rounding", "micro_size": 32,
    "steps": 10, "precision": "fp64", "largest_error": 1e-16,
}  # fmt: skip
KEPT = {"version": 1, "date": "2026-11-22T00:00:00+00:00", **FOUND, "devices": "cpu", "torch": "2.13.0"}


def digits_plan(*arguments: str) -> RunPlan:
    return make_plan(RunConfig.from_dict(compose(["recipe=digits", *arguments]).values))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trainkit/proofs"


@pytest.mark.slow
def test_a_proof_stands_in_the_result_of_such_a_training(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = ["recipe=digits", "strategy=central_storage"]
    assert main(["prove", *threads, "--steps", "2"]) == 0
    proved = api.train(api.compose([*threads, "stop_at_step=1", "hydra.run.dir=run"]))["proved"]
    assert json.loads(Path("run/result.json").read_text())["proved"] == proved
    assert proved["command"] == "trainkit prove recipe=digits strategy=central_storage --steps 2"
    assert (proved["same_training"], proved["micro_size"], proved["steps"]) == ("yes", 32, 2)
    assert api.train(api.compose([*threads, "stop_at_step=1", "seed=1"]))["proved"] is None


def test_the_last_proof_of_a_key_is_kept(cache: Path) -> None:
    plan = digits_plan("strategy=mirrored")
    assert last_proof(plan) is None
    assert keep_proof(plan, FOUND) is None
    assert keep_proof(plan, {**FOUND, "same_training": None}) is None
    assert [path.name for path in cache.iterdir()] == [f"{key_of(plan)}.json"]
    assert (last_proof(plan) or {})["same_training"] is None


@pytest.mark.slow
def test_another_training_or_placement_has_another_key_and_what_is_shown_has_none() -> None:
    mirrored = ("strategy=mirrored", "strategy.replicas=2")
    for other in ("strategy.replicas=3", "strategy.reduce=ring", "batch.micro_size=16", "optimizer.lr=0.5"):
        assert key_of(digits_plan(*mirrored, other)) != key_of(digits_plan(*mirrored)), other
    shown = ("name=other", "loader.num_workers=2", "callbacks=[]", "log_every_steps=3", "stop_at_step=5")
    assert key_of(digits_plan(*mirrored, *shown)) == key_of(digits_plan(*mirrored))


@pytest.mark.parametrize(
    ("content", "is_proof"),
    [
        (json.dumps(KEPT), True),
        ("[" * 10_000, False),
        (json.dumps([KEPT]), False),
        (json.dumps({**KEPT, "version": 2}), False),
        (json.dumps({**KEPT, "steps": True}), False),
        (json.dumps(KEPT) + " " * 20_000, False),
    ],
)
def test_only_a_file_with_the_expected_keys_is_read_as_a_proof(cache: Path, content: str, is_proof: bool) -> None:
    plan = digits_plan()
    cache.mkdir(parents=True)
    (cache / f"{key_of(plan)}.json").write_text(content)
    assert last_proof(plan) == (KEPT if is_proof else None)


def test_a_proof_that_cannot_be_kept_says_why(tmp_path: Path) -> None:
    (tmp_path / "trainkit").write_text("in the way")
    assert keep_proof(digits_plan(), FOUND) == f"Not a directory: {tmp_path}/trainkit/proofs"


def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proofs_folder() == tmp_path / ".cache/trainkit/proofs"
