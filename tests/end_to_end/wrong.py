"""A user's strategy with the oldest bug of the field, the mean of the means of unequal shards; bad models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from trainkit.models.mlp import Mlp
from trainkit.strategies.base import Batch
from trainkit.strategies.core.step import LossDivisor, ShardStep
from trainkit.strategies.one_device import OneDevice


class _Means(ShardStep):
    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        plan, step = self.training.plan, self.ticket.step
        self.divisor = LossDivisor(float(plan.shard_size(step, shard) * plan.num_shards(step)), counted=False)
        return super()._shard(shard, batch)


@dataclass(frozen=True, kw_only=True)
class MeanOfMeans(OneDevice):
    """One device that divides each shard's loss by the shard."""

    shard_step: ClassVar[type[ShardStep]] = _Means


class Drifting(Mlp):
    """A model that adds noise to a weight of its own, on the second replica alone, in its fourth forward pass."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        if self.training and self.passes == 4 and os.environ.get("TRAINKIT_RANK") == "1":
            last = self.layers[-1]
            assert isinstance(last, nn.Linear)
            last.bias.data[0] += 1e-6
        return super().forward(inputs)


class Mixing(Mlp):
    """A model whose outputs depend on the other samples of the shard, without any layer that says so."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs - outputs.mean(0)
