"""Check an export on real samples: a process without trainkit runs it, and its outputs must be those of the run.

A model that draws random numbers is refused first: no two of its calls are equal. Where a format performs the same
operations in the same order, the outputs must have the same bits. Otherwise they may differ by 16 times the rounding
error of the run's own outputs, measured against the same model in float64, but at least by 16 units in the last place
of the largest output.
"""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import build_splits, folded, validation_splits
from trainkit.errors import CheckpointError, ConfigError, Problem, named_first_line
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import GeneratorStates, Untouched
from trainkit.objectives.base import Objective
from trainkit.trained import fresh_process
from trainkit.trained.fresh_process import layers_of, tensors_of

Inputs = Mapping[str, Tensor]
"""Argument of the model's `forward` -> its value for a batch."""
CPU = torch.device("cpu")


def batches_of(cfg: RunConfig, dataset: Any, size: int, device: torch.device = CPU) -> EvalBatches:
    """Return the batches of a dataset, in its order, read as in the training."""
    reading = Reading(device=device, settings=cfg.loader, hooks=DataHooks.of(cfg.data))
    return EvalBatches(dataset, reading, batch_size=size, rank=0, num_ranks=1)


class _CalledError(Exception):
    """The model was called."""


def model_inputs(objective: Objective, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return argument of the model's `forward` -> tensor of a batch, in the order of the arguments.

    The objective gets a function instead of the model, which records its arguments.

    Raises:
        ConfigError: the objective never calls the model, or passes something else than tensors.

    Example:
        >>> from trainkit.objectives.classification import Classification
        >>> batch = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
        >>> {name: value.shape for name, value in model_inputs(Classification(), nn.Linear(2, 2), batch).items()}
        {'input': torch.Size([3, 2])}
    """
    inputs: dict[str, Any] = {}
    signature = inspect.signature(model.forward)

    def record(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            inputs.update(value if is_rest else {name: value})
        raise _CalledError

    cause: Exception | None = None
    try:
        objective.predict(record, batch)
    except _CalledError:
        if inputs and all(isinstance(value, Tensor) for value in inputs.values()):
            return inputs
    except Exception as error:  # noqa: BLE001 - an objective may fail in any way where it gets no outputs
        cause = error
    rule = (
        "does not call the model with tensors only, so the inputs of the model are unknown. Formats that need no "
        "inputs: export --to safetensors; quantize --to int8_weight, int8_dynamic or int4_weight."
    )
    raise ConfigError([Problem(key="objective", value=type(objective).__name__, rule=rule)]) from cause


@contextmanager
def quiet() -> Iterator[None]:
    """Hide log lines up to warnings, and Python's warnings, for the duration of the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_NUM_SAMPLES: Final = 8
_BATCHES: Final = (_NUM_SAMPLES, 3, 1)
"""Samples of each call: the batch size is dynamic."""
_MARGIN: Final = 16.0
"""Allowed multiple of the rounding error of the run's own outputs."""


class NotExportableError(CheckpointError):
    """The model has something that a format cannot hold; the weights themselves are intact."""

    anchor = "a-model-that-a-format-cannot-hold"


class NotBuiltError(Exception):
    """A process without trainkit has no model for the weights of an export."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The check of an export, and its strictness."""

    form: str
    """The format, as given to `--to`."""
    exact: bool
    """Whether the outputs must have the same bits."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the request to the fresh process."""
    free: Sequence[str] = ()
    """Inputs with a dynamic number of tokens: the check also runs half of the tokens."""


def real_samples(cfg: RunConfig, model: nn.Module) -> Inputs:
    """Return the model's inputs for the first samples of the validation split, else of the training split.

    Floating inputs have the dtype of the model.

    Raises:
        ConfigError: the objective passes the model more than tensors.
        DataError: the data of the run is missing or damaged.
        NotExportableError: the outputs are no function of the inputs.
    """
    splits = folded(build_splits(cfg.data), cfg.cv)
    batches = batches_of(cfg, splits[next(iter(validation_splits(splits)), "train")], _NUM_SAMPLES)
    inputs = model_inputs(build(cfg.objective, "objective"), model, next(iter(batches)))
    dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
    samples = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    refuse_draws(model, samples)
    return samples


def refuse_draws(model: nn.Module, samples: Inputs) -> None:
    """Refuse a model that draws random numbers in evaluation mode, or whose outputs change from call to call.

    No file could be compared with it: its own randomness would pass as rounding.

    Raises:
        NotExportableError: it does; the text has the largest difference of two calls.
    """
    drawing: list[str] = []

    def watch(name: str, module: nn.Module) -> list[RemovableHandle]:
        calls: list[GeneratorStates] = []

        def after(*_: object) -> None:
            if calls.pop().moved():
                drawing.append(name)  # an inner layer ends before the outer one

        return [
            module.register_forward_pre_hook(lambda *_: calls.append(GeneratorStates([]))),
            module.register_forward_hook(after),
        ]

    with Untouched(seed=0):
        before = GeneratorStates([])
        try:
            first, drew, second = _outputs(model, samples), before.moved(), _outputs(model, samples)
        except Exception:  # noqa: BLE001 - the format reports what the model does not take
            return
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.shape == b.shape]
    if not drew and len(pairs) == len(first) and all(_are_equal(*pair) for pair in pairs):
        return
    gap = max(((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()), default=0.0)
    fault = "changes its outputs from call to call"
    if drew:
        handles = [handle for name, module in model.named_modules() if name for handle in watch(name, module)]
        with Untouched(seed=0):
            _outputs(model, samples)
        for handle in handles:
            handle.remove()
        fault = f"draws random numbers in evaluation mode{f' (in {drawing[0]})' if drawing else ''}"
    raise NotExportableError(
        f"the model {fault}: two calls with the same {_length(samples)} real samples differ by {gap:.3g}. Draw only "
        "where self.training is true, or make the random numbers an input of forward."
    )


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same numbers, and NaN at the same places."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


def refuse_difference(check: Check, model: nn.Module, samples: Inputs, folder: Path) -> None:
    """Run an export in a fresh process without trainkit, and compare its outputs with those of the run.

    Args:
        check: the format and its bound.
        model: the model of the run, on the CPU, in evaluation mode.
        samples: real samples; the first dimension is the batch.
        folder: the folder of the export.

    Raises:
        NotExportableError: the export cannot be run, or computes something else; the text names the first layer.
    """
    sizes = sorted({min(size, _length(samples)) for size in _BATCHES}, reverse=True)
    batches = [_cut(samples, size, ()) for size in sizes]
    if check.free:
        batches.append(_cut(samples, sizes[0], check.free))
        try:
            _outputs(model, batches[-1])
        except Exception as error:
            raise NotExportableError(f"the model itself accepts no other: {named_first_line(error)}.") from error
    exported = _run(check, batches, folder, layers=False)
    exact_model = model if check.exact else copied(model).double()
    for inputs, results in zip(batches, exported, strict=True):
        outputs, exact = _outputs(model, inputs), _outputs(exact_model, inputs if check.exact else _doubled(inputs))
        if len(outputs) != len(results):
            raise NotExportableError(f"the {check.form} export has {len(results)} outputs, and the run {len(outputs)}.")
        triples = zip(outputs, results.values(), exact, strict=True)
        if worst := next((what for triple in triples if (what := _difference(*triple, check.exact))), None):
            layer = _first_layer(check, model, exact_model, inputs, folder)
            raise NotExportableError(
                f"the {check.form} export is refused: for {_length(inputs)} real samples its outputs differ from "
                f"those of the run ({worst}). {layer}"
            )


def _cut(samples: Inputs, size: int, halved: Sequence[str]) -> Inputs:
    """Return copies of some of the samples, with only the first half of the tokens of the given inputs."""
    return {
        name: (value[:size, : value.shape[1] // 2] if name in halved else value[:size]).contiguous().clone()
        for name, value in samples.items()
    }


def _first_layer(check: Check, model: nn.Module, exact_model: nn.Module, inputs: Inputs, folder: Path) -> str:
    outputs, exact = layers_of(model, inputs), layers_of(exact_model, inputs if check.exact else _doubled(inputs))
    (exported,) = _run(check, [inputs], folder, layers=True)
    for name, value in outputs.items():
        other = exported.get(name)
        if other is None or other.shape != value.shape:
            continue
        if difference := _difference(value, other, exact.get(name, value), check.exact):
            return f"The first layer that differs is {name} ({difference})."
    return "No single layer differs: the difference arises between layers, or after the last one."


def _difference(original: Tensor, exported: Tensor, exact: Tensor, same_bits: bool) -> str | None:
    """Return how two outputs differ by more than allowed; None if they do not."""
    if original.shape != exported.shape:
        return f"the shape is {tuple(exported.shape)}, not {tuple(original.shape)}"
    if _are_equal(original, exported):
        return None
    error = (original.double() - exported.double()).abs().max().item()
    if same_bits or not original.is_floating_point():
        return f"the largest difference is {error:.3g}, and the bits must be the same"
    rounding = (original.double() - exact.double()).abs().max().item()
    last_place = torch.finfo(original.dtype).eps * exact.double().abs().max().item()
    bound = _MARGIN * max(rounding, last_place)
    return None if error <= bound else f"the largest difference is {error:.3g}, and {bound:.3g} is allowed"


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(model(**inputs))


def _doubled(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def _length(inputs: Inputs) -> int:
    return len(next(iter(inputs.values())))


def _run(check: Check, batches: Sequence[Inputs], folder: Path, *, layers: bool) -> list[dict[str, Tensor]]:
    """Return the outputs of the export, or of its layers, for each batch, in their order."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [str(Path(scratch) / f"batch_{number}") for number in range(len(batches))]
        for name, inputs in zip(files, batches, strict=True):
            save_file(dict(inputs), name)
        threads = torch.get_num_threads()
        common = {"format": check.form, "folder": str(folder.absolute()), "threads": threads, **check.request}
        run_fresh({**common, "batches": files, "order": [*batches[0]], "layers": layers}, check.form, Path(scratch))
        outputs = (load_file(f"{name}.out") for name in files)
        return [{name.partition(":")[2]: tensors[name] for name in sorted(tensors)} for tensors in outputs]


def run_fresh(request: Mapping[str, Any], form: str, folder: Path) -> None:
    """Run `fresh_process` on a request, in an empty folder: a process in which importing trainkit fails.

    Raises:
        NotBuiltError: the process cannot build the model.
        NotExportableError: the process has failed; the message contains the last line of its error.
    """
    file = folder / "request.json"
    file.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-P", "-W", "ignore", str(fresh_process.__file__), str(file)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - our own file
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        kind = NotBuiltError if done.returncode == fresh_process.NOT_BUILT else NotExportableError
        raise kind(f"the {form} export cannot be run without trainkit: {reason}")
