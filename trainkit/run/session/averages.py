"""The averages of the weights in a session: shown for an evaluation, and their batch statistics for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainkit.adapters.average import AVERAGE, Average
from trainkit.data.evaluation import EvalBatches
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import Executor
from trainkit.strategies.capabilities import swap_averages
from trainkit.trainer.batch_statistics import count_statistics, restore_statistics, statistics_of
from trainkit.trainer.events import Run


class Averages:
    """The averages of one rank.

    Batch statistics that a training has counted are those of other weights than a mean of weights (`swa`). They are
    counted anew after the last step alone, since that takes a pass over the training data; until then such averages are
    not shown.
    """

    def __init__(
        self, average: Average, plan: RunPlan, run: Run, executor: Executor, *, enter: Callable[[str], None]
    ) -> None:
        self.average, self._plan, self._run, self._executor, self._enter = average, plan, run, executor, enter
        self._counts = average.counts_statistics and bool(statistics_of(executor.local.model))
        self._counted: dict[str, Tensor] = {}
        """Batch statistics of the averages; empty before the last step."""
        self._over = False
        """Whether the training has ended before its last step."""

    def end_early(self) -> bool:
        """Record that the training ends before its last step; return whether it must be evaluated and saved again."""
        again = self._counts_later
        self._over = True
        return again

    @property
    def _counts_later(self) -> bool:
        """Whether batch statistics are counted anew, at a later step."""
        return self._counts and not self._over and self._run.state.step < self._plan.num_steps

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Let the local model compute with the averages; yields whether there are any. Collective."""
        if self._counts_later:
            self._counted = {}
            yield False
            return
        model = self._executor.local.model
        kept = {name: buffer.clone() for name, buffer in statistics_of(model).items()} if self._counts else {}
        here = swap_averages(self._executor)
        try:
            present = bool(self._executor.local.all_ranks.sum(torch.tensor([float(here)])).item())
            if present and self._counts:
                self._set_statistics()
            yield present
        finally:
            if here:
                swap_averages(self._executor)
            if self._counts:
                restore_statistics(model, kept)

    def statistics(self) -> dict[str, Tensor]:
        """Return the batch statistics of the averages for a checkpoint; after the last step. Collective."""
        if self._counts and not self._counted:
            with self.shown():
                pass
        return {f"optimizer/{AVERAGE}/{name}": tensor for name, tensor in self._counted.items()}

    def _set_statistics(self) -> None:
        model = self._executor.local.model
        if self._counted:
            restore_statistics(model, self._counted)
            return
        local, parts = self._executor.local, self._plan.components
        batches = EvalBatches(
            parts.datasets["train"],
            self._plan.reading(local.device),
            batch_size=self._plan.eval_batch_size,
            rank=local.rank,
            num_ranks=local.num_ranks,
            together=parts.strategy.traits.forward_is_collective,
        )
        counted = batches.num_counted
        count_statistics(local, parts.objective, self._with_heartbeats(batches), num_counted=counted)
        self._counted = {name: buffer.clone() for name, buffer in statistics_of(model).items()}

    def _with_heartbeats(self, batches: EvalBatches) -> Iterator[object]:
        for batch in batches:
            yield batch
            self._enter("evaluate")
