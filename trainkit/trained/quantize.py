"""Quantize the trained model of a run folder, and compare it with the original: `trainkit quantize`.

`RUN/quantized/FORMAT` is an export with a description of its quantization:

    model.safetensors   the quantized weights, and the weights that stay in float32
    config.yaml         the node that builds the model, and under `quantized` further facts for loading
    README.md           the model card, with a table that compares it with the original
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.config.grammar import refusal
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.data.splits import build_splits, folded, size_of, validation_splits
from trainkit.errors import ConfigError
from trainkit.files import bytes_needed, num_bytes, refuse_full
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trained.build import Which, build_objective
from trainkit.trained.checking import CPU, Inputs, batches_of, model_inputs
from trainkit.trained.export import config_of_trained, folder_of_format, trained_model, write_export
from trainkit.trained.formats import Format, TrainedModel, Written
from trainkit.trained.model import WEIGHTS
from trainkit.trained.quantized import QUANTIZED, STATIC, description_of, is_linear, quantize, refuse_format
from trainkit.trainer.checkpoint.saving import untied
from trainkit.trainer.checkpoint.tensors import header_of, kinds_of, write_tensors
from trainkit.trainer.evaluate import evaluate
from trainkit.trainer.manifest import owner_of_run
from trainkit.trainer.ownership import locked

CALIBRATION: Final = 512
"""Number of training samples whose activations are observed."""
_BATCH: Final = 256
"""Samples of a forward pass, if the config does not set it."""
_CALIBRATION_BATCH: Final = 64
_TIMED: Final = (1, 64)
"""Numbers of samples of the calls whose latency is measured."""
_MEASURED_S: Final = 0.5
_MIN_CALLS: Final = 5


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
        calibrate: training samples whose activations are observed, for the format that needs it; None: 512.
        checkpoint: the weights to quantize.
        report: receives a line before each long operation.

    Raises:
        ConfigError: there is no such format or run, the run is in use, torchao is not installed, or the format does not
            suit the model.
        DataError: the data of the run is missing or damaged.
        CheckpointError, StorageError: as `trainkit.trained.export.export_at_end`.
    """
    refuse_format(to)
    if calibrate is not None and calibrate < 1:
        raise refusal(f"--calibrate {calibrate}", "must be a whole number of samples, 1 or more.")
    if calibrate is not None and to != STATIC:
        raise refusal(f"--calibrate {calibrate}", f"has no effect: {to} observes no activations. Leave it out.")
    cfg = config_of_trained(path)
    with locked(path / ".lock"):
        trained, splits = trained_model(path, cfg, checkpoint), folded(build_splits(cfg.data), cfg.cv)
        (split,) = validation_splits(splits)[:1] or (None,)
        if split is None:
            raise refusal("data", "has no validation split for comparing the models.")
        model = trained.model()
        inputs = _inputs(cfg, model, splits["train"], calibrate or CALIBRATION) if to == STATIC else []
        report(f"quantizing {cfg.name} to {to}")
        quantized = quantize(trained.model().float(), to, inputs)
        report(f"scoring both on {size_of(splits[split]):,} samples of {split}")
        try:
            timed = _inputs(cfg, model, splits[split], max(_TIMED))[0]
        except ConfigError:  # the objective passes the model more than tensors
            timed = None
        dense, _ = untied({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()})
        precision: Precision = build(cfg.precision, "precision")
        sized = [(model, precision, dense), (quantized.model, Precision(), quantized.tensors)]
        pair = [
            {"num_bytes": size_of_file(tensors), **_measured(cfg, module, policy, timed, (split, splits[split]))}
            for module, policy, tensors in sized
        ]
        rows, share = _table(to, *pair), share_of_weights(model, quantized.layers)
        measured = {"share": share, "split": split, "original": pair[0], "result": pair[1]}
        description = {**description_of(quantized, to), "measured": measured}

        def write(_trained: TrainedModel, draft: Path) -> Written:
            refuse_full(draft / WEIGHTS, bytes_needed(quantized.tensors.values()))
            return Written(files={WEIGHTS: write_tensors(draft / WEIGHTS, quantized.tensors)})

        form = Format(loading=_card(rows, share, quantized.layers, split), write=write)
        described = replace(trained, facts={**trained.facts, QUANTIZED: description})
        done = write_export(described, form, folder_of_format(path / "quantized", to), owner_of_run(path))
    return QuantizedRun(folder=done.folder, rows=rows, share=share, layers=quantized.layers)


def _inputs(cfg: RunConfig, model: nn.Module, dataset: Any, count: int) -> list[Inputs]:
    """Return the inputs of the first `count` samples of a split, in batches; float inputs in float32."""
    size, objective = min(count, _CALIBRATION_BATCH), build_objective(cfg)
    raw = [model_inputs(objective, model, batch) for batch in islice(batches_of(cfg, dataset, size), -(-count // size))]
    return [
        {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
        for inputs in raw
    ]


def _measured(
    cfg: RunConfig, model: nn.Module, precision: Precision, timed: Inputs | None, split: tuple[str, Any]
) -> dict[str, Any]:
    """Score a model on a whole split, and time calls of it; values of YAML."""
    name, dataset = split
    batches = batches_of(cfg, dataset, cfg.eval.batch_size or _BATCH)
    adapted = precision.adapt(model)
    local = LocalModel(model=adapted, device=CPU, data_ranks=LocalCollective(), precision=precision)
    figures = evaluate(local, build_objective(cfg), batches, split=name).figures
    latencies = {} if timed is None else latency(model, timed)
    return {"metrics": dict(figures), "latency_s": {str(samples): seconds for samples, seconds in latencies.items()}}


def latency(model: nn.Module, inputs: Inputs, *, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Return the median seconds of a call with 1 and with 64 samples; if there are fewer real samples, they are
    repeated.
    """
    medians = {}
    for size in _TIMED:
        repeated = {name: value[torch.arange(size) % len(value)] for name, value in inputs.items()}
        taken: list[float] = []
        with torch.no_grad():
            model(**repeated)
            began = clock()
            while len(taken) < _MIN_CALLS or clock() - began < _MEASURED_S:
                start = clock()
                model(**repeated)
                taken.append(clock() - start)
        medians[size] = statistics.median(taken)
    return medians


def size_of_file(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of a safetensors file of some tensors.

    Example:
        >>> size_of_file({"a": torch.zeros(2, 3)})
        120
    """
    _, header = header_of(kinds_of(tensors))
    return 8 + len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def share_of_weights(model: nn.Module, layers: Sequence[str]) -> dict[str, float]:
    """Return the share of elements that were quantized: of the weights of linear layers, and of all parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Embedding(2, 2))
        >>> share_of_weights(model, ["0"])
        {'linear': 0.5, 'all': 0.3333333333333333}
    """
    modules = {name: module for name, module in model.named_modules() if name in layers or is_linear(module)}
    sizes = {name: module.weight.numel() for name, module in modules.items() if isinstance(module.weight, Tensor)}
    linear = {name: size for name, size in sizes.items() if is_linear(modules[name])}
    quantized = sum(size for name, size in linear.items() if name in layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    share = quantized / sum(linear.values()) if linear else 0.0
    return {"linear": share, "all": sum(sizes[name] for name in layers) / total}


def _table(to: str, original: Mapping[str, Any], quantized: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the header and the two rows of the table, as text."""
    ratio = quantized["num_bytes"] / max(1, original["num_bytes"])
    sizes = (num_bytes(original["num_bytes"]), f"{num_bytes(quantized['num_bytes'])} ({ratio:.2f})")
    rows = [("model", "file", *original["metrics"], *(f"batch {size}" for size in original["latency_s"]))]
    for name, size, row in zip(("original", to), sizes, (original, quantized), strict=True):
        figures = (f"{row['metrics'][metric]:.4g}" for metric in original["metrics"])
        rows.append((name, size, *figures, *(f"{1000 * seconds:.3g} ms" for seconds in row["latency_s"].values())))
    return rows


def _card(rows: Sequence[Sequence[str]], share: Mapping[str, float], layers: Sequence[str], split: str) -> str:
    """Return the section of the model card: the table, and how to load the model."""
    header, *body = rows
    lines = [header, [":--", *("--:" for _ in header[1:])], *body]
    table, threads = "".join(f"| {' | '.join(line)} |\n" for line in lines), torch.get_num_threads()
    return (
        '```python\nimport trainkit\n\nmodel = trainkit.load("FOLDER")  # this folder; it needs torchao\n```\n\n'
        f"## Beside the original\n\n{table}\nScored on the whole split {split}; latency on the CPU, "
        f"{threads} thread{'' if threads == 1 else 's'}. Quantized layers: {len(layers)}, "
        f"{share['linear']:.1%} of the weights of linear layers and {share['all']:.1%} of all parameters.\n"
    )
