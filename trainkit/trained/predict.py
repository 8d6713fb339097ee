"""Predict each sample once: scores, probabilities, classes, the outputs of a layer, or a named output of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainkit.cluster.host import use_device
from trainkit.config.door import called_from
from trainkit.config.identity import run_config
from trainkit.config.sections import LoaderConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.build import build
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model, Objective, Supervised
from trainkit.objectives.fields import named_fields
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trained.build import Which, build_objective, refuse_unknown_checkpoint
from trainkit.trained.model import load_model
from trainkit.trained.parts import Chunks, Parts, uneven_rows
from trainkit.trainer.evaluate import evaluation_mode

_KINDS: Final = ("logits", "probabilities", "classes")
_NAMED: Final = ("embedding", "output")
"""The words before a colon in `predict.outputs`."""
_RULE: Final = (
    "must be logits, probabilities, classes, embedding:LAYER with the name of a module of the model, or output:NAME "
    "with the name or index of one of its outputs."
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The content of each row of a prediction.

    Example:
        >>> Outputs.parse("embedding:blocks.2")
        Outputs(kind='embedding', name='blocks.2')
    """

    kind: str
    name: str = ""
    """The module whose outputs an embedding holds, by its name in the model; or the output of the model."""

    @classmethod
    def parse(cls, text: str) -> Outputs:
        """Read the key `predict.outputs`.

        Raises:
            ConfigError: it is none of the kinds, or an embedding without a layer.
        """
        kind, _, name = text.partition(":")
        if kind not in (_NAMED if name else _KINDS):
            raise ConfigError([Problem(key="predict.outputs", value=text, rule=_RULE)])
        return cls(kind=kind, name=name)

    @property
    def text(self) -> str:
        """The value of the key."""
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def problems(self, objective: Objective, model: nn.Module) -> list[Problem]:
        """Return the problems of this choice for an objective and a model, which may be on the meta device."""
        modules = dict(model.named_modules())
        if self.kind in ("probabilities", "classes") and not objective.log_scores:
            rule = f"the outputs of {type(objective).__name__} are not scores of classes. Use logits."
        elif self.kind == "embedding" and self.name not in modules:
            known = ", ".join(name for name in list(modules)[:12] if name)
            rule = f"the model has no module of this name. It has {known}{' ...' if len(modules) > 13 else ''}."
        else:
            return []
        return [Problem(key="predict.outputs", value=self.text, rule=rule)]

    @contextmanager
    def of(self, model: nn.Module, objective: Objective) -> Iterator[OutputFunction]:
        """Yield a function that runs the model on a batch, for the duration of the block."""
        function = OutputFunction(self, model, objective)
        watched = model.get_submodule(self.name if self.kind == "embedding" else "") if self.name else None
        handle = None if watched is None else watched.register_forward_hook(function.keep)
        try:
            yield function
        finally:
            if handle is not None:
                handle.remove()


class OutputFunction:
    """Runs a model on a batch and returns the rows of a prediction."""

    def __init__(self, outputs: Outputs, model: nn.Module, objective: Objective) -> None:
        self._outputs, self._model, self._objective = outputs, model, objective
        self._kept: Any = None

    def keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep the outputs of a layer, or of the model; a forward hook."""
        del module, inputs
        self._kept = outputs

    def __call__(self, batch: Any, *, num_rows: int) -> Tensor:
        """Return (num_rows, ...) on the device: float32 or float64, int64 for classes.

        Raises:
            ConfigError: neither the objective nor the model has an output of the name.
            DataError: the model gives no tensor with one row per sample.
        """
        self._kept = None
        try:
            scores = self._objective.predict(self._model, batch)
        except Exception:
            if self._outputs.kind != "output" or self._kept is None:
                raise
            scores = None  # the model has run: what the objective makes of its outputs is not asked for
        if self._outputs.kind == "embedding":
            scores = self._kept[0] if isinstance(self._kept, tuple) and self._kept else self._kept
        elif self._outputs.kind == "output":
            scores = self._named(scores)
        if not isinstance(scores, Tensor) or not scores.dim() or scores.shape[0] != num_rows:
            found = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            rule = "a prediction needs one row per sample. predict.outputs=output:NAME takes one of several outputs."
            raise DataError(f"the model gives {found} for {num_rows} samples: {rule}")
        self._kept, scores, dim = None, scores.detach(), self._objective.class_dim
        if self._outputs.kind == "classes":
            return scores.argmax(dim)
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return scores.softmax(dim) if self._outputs.kind == "probabilities" else scores

    def _named(self, predicted: Any) -> Any:
        """Return an output by its name or index: of what the objective predicts, or else of the model."""
        name = self._outputs.name
        key = int(name) if name.isdecimal() else name
        known: list[str] = []
        for outputs in (predicted, self._kept):
            named = named_fields(outputs)
            if key in named:
                return named[key]
            known += map(str, named)
        has = f"They are {', '.join(dict.fromkeys(known))}" if known else "The model gives one tensor: use logits"
        rule = f"neither the objective nor the model gives an output of this name. {has}."
        raise ConfigError([Problem(key="predict.outputs", value=self._outputs.text, rule=rule)])


def predicted(
    local: LocalModel,
    objective: Objective,
    outputs: Outputs,
    dataset: Any,
    reading: Reading,
    *,
    chunks: Chunks,
    starts: Sequence[int],
) -> Generator[Tensor]:
    """Yield the rows of one batch after another, on the device.

    Args:
        local: the model; its training mode is restored afterwards.
        objective: knows which fields of a batch are the model's inputs.
        outputs: the content of a row.
        dataset: the samples.
        reading: how they are read.
        chunks: the size of the dataset and of a batch.
        starts: the first sample of each batch.

    Raises:
        DataError: samples have outputs of several shapes.
    """
    size, shape = chunks.batch_size, None
    batches = EvalBatches(dataset, reading, batch_size=size, rank=local.rank, num_ranks=local.num_ranks, starts=starts)
    with outputs.of(local.model, objective) as run:
        for start, batch in zip(starts, batches, strict=True):
            with evaluation_mode(local, objective) as enter, Untouched(seed=0, devices=[local.device]):
                enter(start // size)
                with torch.no_grad():
                    rows = run(batch, num_rows=min(size, chunks.num_rows - start))
            shape = rows.shape[1:] if shape is None else shape
            if rows.shape[1:] != shape:
                raise uneven_rows(shape, rows.shape[1:], start)
            yield rows


class _StoppedError(Exception):
    """Raised to leave an incomplete part."""


def compute_parts(
    local: LocalModel,
    parts: Parts,
    todo: Sequence[int],
    rows: Callable[[Sequence[int]], Generator[Tensor]],
    *,
    together: bool,
    is_asked_to_stop: Callable[[], bool],
) -> bool:
    """Compute one rank's share of a prediction, and write each chunk as a part; collective.

    If several ranks compute a replica together, the first of them writes.

    Args:
        local: the ranks.
        parts: the folder to which the parts are written.
        todo: the chunks that are not complete, the same on every rank: the i-th belongs to data rank i modulo the
            data ranks.
        rows: computes the rows of the batches with the given first samples.
        together: whether ranks communicate in a forward pass, so that all compute equally many batches.
        is_asked_to_stop: returns whether this process was asked to stop; it then stops after the current batch.

    Returns:
        Whether everything is done; False: it was asked to stop.
    """
    mine, ranks = list(todo[local.rank :: local.num_ranks]), local.all_ranks
    starts = [start for chunk in mine for start in parts.chunks.batches_of(chunk)]
    if together:
        counts = ranks.gather(torch.tensor([len(starts)]))
        starts += [0] * (max(int(one.item()) for one in counts) - len(starts))
    data_ranks = [int(one.item()) for one in ranks.gather(torch.tensor([local.rank]))]
    writes = data_ranks.index(local.rank) == ranks.rank

    def until_asked() -> Iterator[NDArray[Any]]:
        with closing(rows(starts)) as found:
            for _ in starts:
                asked = is_asked_to_stop()
                if together and ranks.num_ranks > 1:  # those of one replica stop together
                    asked = bool(ranks.sum(torch.tensor([float(asked)])).item())
                if asked:
                    raise _StoppedError
                yield next(found).cpu().numpy()

    batches = until_asked()
    try:
        for chunk in mine:
            own = islice(batches, len(parts.chunks.batches_of(chunk)))
            if writes:
                parts.write(chunk, own)
            else:
                deque(own, maxlen=0)
        deque(batches, maxlen=0)  # those that only keep the ranks together
    except _StoppedError:
        return False
    return True


@called_from("python")
def predict(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Tensor:
    """Predict every sample of a dataset, in its order, in this process.

    Args:
        model: a model, or what `trainkit.load` takes.
        dataset: samples with a length, by index or by iteration; targets are not needed.
        outputs: logits, probabilities, classes, embedding:LAYER, or output:NAME.
        batch_size: samples per forward pass.
        device: where to compute; None: where the model is, and the first GPU for a path.
        checkpoint: the checkpoint of a run folder to load.
        packages: your own packages that the classes of a path may come from.

    Returns:
        (samples, ...) on the CPU.

    Raises:
        ConfigError: there is no such model, or `outputs` does not suit it.
        DataError: a sample cannot be read, or samples have outputs of several shapes.

    Example:
        >>> predict(nn.Linear(2, 3), torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """
    found = predictor(
        model, outputs=outputs, batch_size=batch_size, device=device, checkpoint=checkpoint, packages=packages
    )
    return found(dataset)


def predictor(
    model: nn.Module | str | Path,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Callable[[Any], Tensor]:
    """Load a model once, and return the function that `predict` calls with a dataset; arguments are those of it."""
    refuse_unknown_checkpoint(checkpoint)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError([Problem(key="batch_size", value=batch_size, rule="must be a whole number, 1 or more.")])
    wanted, precision = Outputs.parse(outputs), Precision()
    objective: Objective = _AnyInputs(wanted)
    if isinstance(model, nn.Module):
        found = model
    else:
        path = Path(model).expanduser()
        found = load_model(path, checkpoint=checkpoint, packages=packages)
        if (path / "resolved.yaml").is_file():
            with allow_packages(packages):
                cfg = run_config(path)
                precision, objective = build(cfg.precision, "precision"), build_objective(cfg)
            found = precision.adapt(found)
        device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if device is not None:
        found = found.to(device)
    if problems := wanted.problems(objective, found):
        raise ConfigError(problems)
    place = next((one.device for one in found.parameters()), torch.device("cpu"))
    use_device(place)
    if found is not model:  # by default torch rounds the products of a convolution to ten bits
        precision.apply_globally(place.type)
    local = LocalModel(model=found, device=place, data_ranks=LocalCollective(), precision=precision)

    def run(dataset: Any) -> Tensor:
        chunks = Chunks(num_rows=size_of(dataset), batch_size=batch_size)
        starts, reading = range(0, chunks.num_rows, batch_size), Reading(device=place, settings=LoaderConfig())
        rows = predicted(local, objective, wanted, dataset, reading, chunks=chunks, starts=starts)
        return torch.cat([one.cpu() for one in rows])

    return run


class _AnyInputs(Supervised):
    """Takes the input of a sample by its common names."""

    log_scores = True

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def predict(self, model: Model, batch: Any) -> Any:
        """Run the model.

        Raises:
            ConfigError: the dim of the classes is needed, and not known.
        """
        found = super().predict(model, batch)
        if self._outputs.kind in ("probabilities", "classes") and found.dim() > 2:
            rule = (
                f"needs to know which dim has the classes, and the model alone, without its objective, gives "
                f"{tuple(found.shape)}. Predict from the folder of its run, or take logits."
            )
            raise ConfigError([Problem(key="outputs", value=self._outputs.kind, rule=rule)])
        return found

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Raise an error: nothing is scored."""
        raise NotImplementedError
