"""Predict each sample once, in parts: scores, probabilities, classes, or the outputs of a layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.config.sections import LoaderConfig
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.inference.parts import Chunks, Parts
from trainkit.numerics.generators import Untouched
from trainkit.objectives.base import Objective
from trainkit.strategies.base import LocalModel
from trainkit.trainer.evaluate import evaluation_mode

KINDS: Final = ("logits", "probabilities", "classes", "embedding")
"""The names before a colon in `predict.outputs`."""
_RULE: Final = "must be logits, probabilities, classes, or embedding:LAYER with the name of a module of the model."


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The content of each row of a prediction.

    Example:
        >>> Outputs.parse("embedding:blocks.2")
        Outputs(kind='embedding', layer='blocks.2')
    """

    kind: str
    layer: str = ""
    """The module whose outputs an embedding holds, by its name in the model."""

    @classmethod
    def parse(cls, text: str) -> Outputs:
        """Read the key `predict.outputs`.

        Raises:
            ConfigError: it is none of the kinds, or an embedding without a layer.
        """
        kind, _, layer = text.partition(":")
        if kind not in KINDS or (kind == "embedding") != bool(layer):
            raise ConfigError([Problem(key="predict.outputs", value=text, rule=_RULE)])
        return cls(kind=kind, layer=layer)

    def problems(self, objective: Objective, model: nn.Module) -> list[Problem]:
        """Return the problems of this choice for an objective and a model, which may be on the meta device."""
        text = f"{self.kind}:{self.layer}" if self.layer else self.kind
        if self.kind in ("probabilities", "classes") and not objective.log_scores:
            rule = f"the outputs of {type(objective).__name__} are not scores of classes. Use logits."
            return [Problem(key="predict.outputs", value=text, rule=rule)]
        modules = dict(model.named_modules())
        if self.layer and self.layer not in modules:
            known = ", ".join(name for name in list(modules)[:12] if name)
            rule = f"the model has no module of this name. It has {known}{' ...' if len(modules) > 13 else ''}."
            return [Problem(key="predict.outputs", value=text, rule=rule)]
        return []

    @contextmanager
    def of(self, model: nn.Module, objective: Objective) -> Iterator[OutputFunction]:
        """Yield a function that runs the model on a batch, for the duration of the block."""
        function = OutputFunction(self, model, objective)
        if not self.layer:
            yield function
            return
        handle = model.get_submodule(self.layer).register_forward_hook(function.keep)
        try:
            yield function
        finally:
            handle.remove()


class OutputFunction:
    """Runs a model on a batch and returns the rows of a prediction."""

    def __init__(self, outputs: Outputs, model: nn.Module, objective: Objective) -> None:
        self._outputs, self._model, self._objective = outputs, model, objective
        self._kept: Any = None

    def keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep the outputs of a layer; a forward hook."""
        del module, inputs
        self._kept = outputs

    def __call__(self, batch: Any, *, num_rows: int) -> Tensor:
        """Return (num_rows, ...) on the device: float32 or float64, int64 for classes.

        Raises:
            DataError: the model gives no tensor with one row per sample.
        """
        scores = self._objective.predict(self._model, batch)
        if self._outputs.layer:
            outputs, self._kept = self._kept, None
            scores = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if not isinstance(scores, Tensor) or not scores.dim() or scores.shape[0] != num_rows:
            found = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise DataError(f"the model gives {found} for {num_rows} samples: a prediction needs one row per sample.")
        scores, dim = scores.detach(), self._objective.class_dim
        if self._outputs.kind == "classes":
            return scores.argmax(dim)
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return scores.softmax(dim) if self._outputs.kind == "probabilities" else scores


def predicted(
    local: LocalModel,
    objective: Objective,
    outputs: Outputs,
    batches: EvalBatches,
    *,
    chunks: Chunks,
    starts: Sequence[int],
) -> Iterator[Tensor]:
    """Yield the rows of one batch after another, on the device.

    Args:
        local: the model; its training mode is restored afterwards.
        objective: knows which fields of a batch are the model's inputs.
        outputs: the content of a row.
        batches: the batches, on the device of the model.
        chunks: the size of the dataset and of a batch.
        starts: the first sample of each batch.
    """
    size = chunks.batch_size
    with outputs.of(local.model, objective) as run:
        for start, batch in zip(starts, batches, strict=True):
            with evaluation_mode(local, objective) as enter, Untouched(seed=0, devices=[local.device]):
                enter(start // size)
                with torch.no_grad():
                    rows = run(batch, num_rows=min(size, chunks.num_rows - start))
            yield rows


@dataclass(kw_only=True)
class PartsComputation:
    """One rank's share of a prediction: it computes its chunks and writes each as a part.

    If several ranks compute a replica together, the first of them writes.
    """

    local: LocalModel
    """The model, and the ranks."""
    objective: Objective
    """Knows which fields of a batch are the model's inputs."""
    outputs: Outputs
    """Content of a row."""
    dataset: Any
    """The samples."""
    parts: Parts
    """The folder to which the parts are written."""
    settings: LoaderConfig
    """Settings for reading samples."""
    hooks: DataHooks
    """The code that `data` names in addition to its class."""
    together: bool
    """Whether ranks communicate in a forward pass, so that all compute equally many batches."""
    is_asked_to_stop: Callable[[], bool]
    """Function that returns whether this process was asked to stop; it then stops after the current batch."""
    batch_done: Callable[[int], None]
    """Callback that receives the number of batches that this rank has computed."""

    def run(self, todo: Sequence[int]) -> bool:
        """Compute the chunks of this rank; collective.

        Args:
            todo: the chunks that are not complete, the same on every rank: the i-th belongs to data rank i modulo the
                data ranks.

        Returns:
            Whether everything is done; False: it was asked to stop.
        """
        local, chunks = self.local, self.parts.chunks
        mine = list(todo[local.rank :: local.num_ranks])
        starts = [start for chunk in mine for start in chunks.batches_of(chunk)]
        num_own = len(starts)
        if self.together:
            counts = local.all_ranks.gather(torch.tensor([len(starts)]))
            starts += [0] * (max(int(one.item()) for one in counts) - len(starts))
        writes = self._is_first_of_replica()
        with closing(self._rows(starts)) as rows:
            for chunk in mine:
                if not self._compute_part(chunk, rows, writes=writes):
                    return False
            return all(self._next(rows) is not None for _ in range(len(starts) - num_own))

    def _rows(self, starts: Sequence[int]) -> Generator[Tensor]:
        local, chunks = self.local, self.parts.chunks
        batches = EvalBatches(
            self.dataset,
            Reading(device=local.device, settings=self.settings, hooks=self.hooks),
            batch_size=chunks.batch_size,
            rank=local.rank,
            num_ranks=local.num_ranks,
            starts=starts,
        )
        found = predicted(local, self.objective, self.outputs, batches, chunks=chunks, starts=starts)
        for done, rows in enumerate(found, start=1):
            yield rows
            self.batch_done(done)

    def _next(self, rows: Iterator[Tensor]) -> Tensor | None:
        """Return the rows of the next batch; None if this rank, or a rank of the same replica, was asked to stop."""
        asked = self.is_asked_to_stop()
        ranks = self.local.all_ranks
        if self.together and ranks.num_ranks > 1:
            asked = bool(ranks.sum(torch.tensor([float(asked)])).item())
        return None if asked else next(rows)

    def _compute_part(self, chunk: int, rows: Iterator[Tensor], *, writes: bool) -> bool:
        """Compute a chunk, and write it if this rank writes; return whether it is complete."""
        try:
            with self.parts.writing(chunk) if writes else nullcontext() as part:
                for _ in self.parts.chunks.batches_of(chunk):
                    found = self._next(rows)
                    if found is None:
                        raise _StoppedError
                    if part is not None:
                        part.append(found.cpu().numpy())
        except _StoppedError:
            return False
        return True

    def _is_first_of_replica(self) -> bool:
        """Return whether this rank writes, if several ranks compute one replica; collective."""
        local = self.local
        data_ranks = [int(one.item()) for one in local.all_ranks.gather(torch.tensor([local.rank]))]
        return data_ranks.index(local.rank) == local.all_ranks.rank


class _StoppedError(Exception):
    """Raised to leave an incomplete part."""
