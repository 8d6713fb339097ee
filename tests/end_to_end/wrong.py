"""Users' strategies with the oldest bugs of the field, means of means and sums of sums; bad models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from trainkit.models.mlp import Mlp
from trainkit.strategies.base import Batch, SetupRequest
from trainkit.strategies.core.step import LossDivisor, ShardStep
from trainkit.strategies.core.synchronous import SynchronousExecutor
from trainkit.strategies.mesh.strategy import Mesh
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


@dataclass(frozen=True, kw_only=True)
class Doubled(Mesh):
    """A mesh that adds the gradients of cut layers up twice."""

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Any]:
        executor = super().setup(request)
        for param in executor.local.model.parameters() if self.tensor > 1 else ():
            param.register_hook(lambda grad: 2 * grad)
        return executor
