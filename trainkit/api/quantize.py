"""Quantize the trained model of a run folder, and compare it with the original: `trainkit quantize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from trainkit.config.grammar import refusal
from trainkit.config.schema import RunConfig
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import build_splits, folded, size_of, validation_splits
from trainkit.errors import ConfigError
from trainkit.exporting.folder import write_export
from trainkit.exporting.trained import Inputs, model_inputs
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective
from trainkit.quantizing.description import QUANTIZED, QuantizedFile, description_of
from trainkit.quantizing.formats import Quantized, format_named, needs_calibration, quantize
from trainkit.quantizing.measuring import (
    BATCHES,
    Measured,
    file_size,
    latency,
    markdown,
    score,
    share_of_weights,
    size_of_file,
    table,
)
from trainkit.run.folder.export import folder_of_format, trained_model, trained_run
from trainkit.run.folder.model_file import Which, precision_of
from trainkit.run.planning.build import build_objective

CALIBRATION: Final = 512
"""Number of training samples whose activations are observed."""
_BATCH: Final = 256
"""Samples of a forward pass, if the config does not set it."""
_CALIBRATION_BATCH: Final = 64


@dataclass(frozen=True, kw_only=True)
class QuantizedRun:
    """The result of `quantize_run`."""

    folder: Path
    rows: list[tuple[str, ...]]
    """The rows of the table: header, original, quantized model."""
    share: Mapping[str, float]
    """Share of the elements that were quantized: of the weights of linear layers, and of `all` parameters."""
    layers: tuple[str, ...]
    """The modules whose weights were quantized."""


def quantize_run(
    path: Path,
    *,
    to: str,
    calibrate: int | None = None,
    checkpoint: Which = "last",
    report: Callable[[str], None] = lambda _line: None,
) -> QuantizedRun:
    """Quantize the model of a run that has ended, into `RUN/quantized/FORMAT`.

    Args:
        path: the run folder.
        to: the format.
        calibrate: training samples whose activations are observed, for the formats that need it; None: 512.
        checkpoint: the weights to quantize.
        report: receives a line before each long operation.

    Raises:
        ConfigError: there is no such format or run, the run is in use, torchao is not installed, or the format does not
            suit the model.
        DataError: the data of the run is missing or damaged.
        CheckpointError, StorageError: as `trainkit.run.folder.export.export_at_end`.
    """
    format_named(to)
    _refuse_calibration(to, calibrate)
    folder, cfg = trained_run(path)
    with folder.lock():
        trained = trained_model(folder, cfg, checkpoint, metrics={})
        bench = _Bench.of(cfg)
        model = trained.build(trained.weights.tensors)
        inputs = bench.inputs(model, "train", calibrate or CALIBRATION) if needs_calibration(to) else []
        report(f"quantizing {cfg.name} to {to}")
        quantized = quantize(trained.build(trained.weights.tensors).float(), to, inputs)
        report(f"scoring both on {size_of(bench.splits[bench.split]):,} samples of {bench.split}")
        timed = bench.inputs_to_time(model)
        beside = bench.measured("original", model, timed, num_bytes=file_size(model), precision=bench.precision)
        size = size_of_file(quantized.tensors)
        own = bench.measured(to, quantized.model, timed, num_bytes=size, precision=Precision())
        rows, share = table(beside, own), share_of_weights(model, quantized.layers)
        measured = {"share": share, "split": bench.split, "original": beside.facts(), "result": own.facts()}
        description = {**description_of(quantized, to), "measured": measured}
        about = replace(trained, facts={**trained.facts, QUANTIZED: description})
        target = folder_of_format(path / "quantized", to)
        card = _card(rows, share, quantized, bench.split)
        write_export(about, QuantizedFile(quantized=quantized, LOADING=card), target, folder.take())
    return QuantizedRun(folder=target, rows=rows, share=share, layers=quantized.layers)


def _refuse_calibration(to: str, calibrate: int | None) -> None:
    if calibrate is not None and calibrate < 1:
        raise refusal(f"--calibrate {calibrate}", "must be a whole number of samples, 1 or more.")
    if calibrate is not None and not needs_calibration(to):
        raise refusal(f"--calibrate {calibrate}", f"has no effect: {to} observes no activations. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The data and the objective of a run, by which two models are measured."""

    cfg: RunConfig
    splits: Mapping[str, Any]
    objective: Objective
    precision: Precision
    split: str
    """The split that is scored."""

    @classmethod
    def of(cls, cfg: RunConfig) -> _Bench:
        splits = folded(build_splits(cfg.data), cfg.cv)
        named = validation_splits(splits)
        if not named:
            raise refusal("data", "has no validation split for comparing the models.")
        return cls(cfg=cfg, splits=splits, objective=build_objective(cfg), precision=precision_of(cfg), split=named[0])

    def batches(self, split: str, size: int) -> EvalBatches:
        """Return the batches of a split, on the CPU."""
        reading = Reading(device=torch.device("cpu"), settings=self.cfg.loader, hooks=DataHooks.of(self.cfg.data))
        return EvalBatches(self.splits[split], reading, batch_size=size, rank=0, num_ranks=1)

    def inputs(self, model: nn.Module, split: str, count: int) -> list[Inputs]:
        """Return the inputs of the first `count` samples of a split, in batches; float inputs in float32."""
        size = min(count, _CALIBRATION_BATCH)
        batches = list(islice(self.batches(split, size), -(-count // size)))
        found = [model_inputs(self.objective, model, batch) for batch in batches]
        return [
            {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
            for inputs in found
        ]

    def inputs_to_time(self, model: nn.Module) -> Inputs | None:
        """Return the inputs whose latency is measured; None if the objective passes the model more than tensors."""
        try:
            return self.inputs(model, self.split, max(BATCHES))[0]
        except ConfigError:
            return None

    def measured(
        self, name: str, model: nn.Module, timed: Inputs | None, *, num_bytes: int, precision: Precision
    ) -> Measured:
        """Score a model on the whole split, and time calls of it."""
        figures = score(
            precision.adapt(model),
            self.objective,
            self.batches(self.split, self.cfg.eval.batch_size or _BATCH),
            precision,
            split=self.split,
        )
        taken = {} if timed is None else latency(model, timed)
        return Measured(name=name, num_bytes=num_bytes, figures=figures, latency_s=taken)


def _card(rows: list[tuple[str, ...]], share: Mapping[str, float], quantized: Quantized, split: str) -> str:
    """Return the section of the model card: the table, and how to load the model."""
    linear, every, threads = share["linear"], share["all"], torch.get_num_threads()
    return (
        '```python\nimport trainkit\n\nmodel = trainkit.load("FOLDER")  # this folder; it needs torchao\n```\n\n'
        f"## Beside the original\n\n{markdown(rows)}\nScored on the whole split {split}; latency on the CPU, "
        f"{threads} thread{'' if threads == 1 else 's'}. Quantized layers: {len(quantized.layers)}, "
        f"{linear:.1%} of the weights of linear layers and {every:.1%} of all parameters.\n"
    )
