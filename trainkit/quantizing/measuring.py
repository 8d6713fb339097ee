"""Compare a quantized model with its original: size, score on a whole split, and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.data.reading.loader import EvalBatches
from trainkit.exporting.trained import Inputs
from trainkit.files import num_bytes
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective
from trainkit.quantizing.transposed import is_linear
from trainkit.report.numbers import figure
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.checkpoint.saving import untied
from trainkit.trainer.checkpoint.tensors import header_of, kinds_of
from trainkit.trainer.evaluate import evaluate

BATCHES: Final = (1, 64)
"""Numbers of samples of the calls whose latency is measured."""
_MEASURED_S: Final = 0.5
_MIN_CALLS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row of the table."""

    name: str
    """`original`, or the format."""
    num_bytes: int
    """Size of the file of weights."""
    figures: Mapping[str, float]
    """Results on the split, by name."""
    latency_s: Mapping[int, float]
    """Number of samples of a call -> median seconds."""

    def facts(self) -> dict[str, Any]:
        """Return the row as values of YAML."""
        latency = {str(size): seconds for size, seconds in self.latency_s.items()}
        return {"num_bytes": self.num_bytes, "metrics": dict(self.figures), "latency_s": latency}


def score(
    model: nn.Module, objective: Objective, batches: EvalBatches, precision: Precision, *, split: str
) -> dict[str, float]:
    """Return the results of a model on a split, each sample once."""
    local = LocalModel(model=model, device=torch.device("cpu"), data_ranks=LocalCollective(), precision=precision)
    return evaluate(local, objective, batches, split=split).figures


def latency(model: nn.Module, inputs: Inputs, *, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Return the median seconds of a call with 1 and with 64 samples; if there are fewer real samples, they are
    repeated.
    """
    return {size: _seconds(model, _repeated(inputs, size), clock) for size in BATCHES}


def _seconds(model: nn.Module, inputs: Inputs, clock: Callable[[], float]) -> float:
    taken: list[float] = []
    with torch.no_grad():
        model(**inputs)
        began = clock()
        while len(taken) < _MIN_CALLS or clock() - began < _MEASURED_S:
            start = clock()
            model(**inputs)
            taken.append(clock() - start)
    return statistics.median(taken)


def _repeated(inputs: Inputs, size: int) -> dict[str, Tensor]:
    return {name: value[torch.arange(size) % len(value)] for name, value in inputs.items()}


def table(original: Measured, quantized: Measured) -> list[tuple[str, ...]]:
    """Return the header and the two rows of the table, as text."""
    names = list(original.figures)
    header = ("model", "file", *names, *(f"batch {size}" for size in original.latency_s))
    ratio = quantized.num_bytes / max(1, original.num_bytes)
    sizes = (num_bytes(original.num_bytes), f"{num_bytes(quantized.num_bytes)} ({ratio:.2f})")
    return [
        header,
        *(
            (
                row.name,
                size,
                *(figure(row.figures[name]) for name in names),
                *(f"{1000 * seconds:.3g} ms" for seconds in row.latency_s.values()),
            )
            for row, size in zip((original, quantized), sizes, strict=True)
        ),
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown; the first row is its header."""
    header, *body = rows
    lines = [header, [":--", *("--:" for _ in header[1:])], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def file_size(model: nn.Module) -> int:
    """Return the size of a file with the parameters and buffers of a model, each counted once."""
    unique, _ = untied({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()})
    return size_of_file(unique)


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
    sizes = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if name in layers or is_linear(module)
        if isinstance(module.weight, Tensor)
    }
    linear = {name for name in sizes if is_linear(model.get_submodule(name))}
    num_linear = sum(sizes[name] for name in linear)
    quantized = sum(sizes[name] for name in layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(sizes[name] for name in linear.intersection(layers)) / num_linear if num_linear else 0.0
    return {"linear": share, "all": quantized / total}
