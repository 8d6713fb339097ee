"""Run a model over a dataset in order: every rank computes its chunks and writes them as parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.config.sections import LoaderConfig
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.inference.outputs import Outputs
from trainkit.inference.parts import Chunks, Parts
from trainkit.numerics.generators import Untouched
from trainkit.objectives.base import Objective
from trainkit.strategies.base import LocalModel
from trainkit.trainer.evaluate import evaluation_mode


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
