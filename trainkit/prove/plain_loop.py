"""The plain loop: forward and backward of each shard of a step, alone, in this process.

It uses the model, the objective, the data and the random keys, and no part of an executor: no accumulation, no packing,
no reducer, no division of the loss, no clipping, no fused kernel. Its sums are the definitions of docs/numbers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.cluster.tasks import Identity
from trainkit.data.reading.loader import Loader
from trainkit.prove.faults import Shard, StepEvidence
from trainkit.run.folder.continued import starting_weights
from trainkit.run.planning.build import transformed_model
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.restore import loader_of, setup_request
from trainkit.strategies.base import Ticket
from trainkit.strategies.core.buffers import sample_dims_of
from trainkit.strategies.one_device import OneDevice


class PlainLoop:
    """A model on one device, and the shards of any step of its training."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        task = plan.tasks[0]
        model = transformed_model(plan.cfg, plan.components.strategy, task)  # compiled code draws other numbers
        request = setup_request(plan, Identity.solo(task.device), model)
        self._replica = OneDevice().setup(request).local
        self.params = self._replica.params
        saved = self._replica.model.state_dict()
        self._buffers = {name: buffer for name, buffer in self._replica.model.named_buffers() if name in saved}
        dims = sample_dims_of(self._replica.model)
        self.per_sample = frozenset(name for name, dim in dims.items() if dim is not None)
        """Names of the buffers that hold state per sample."""
        self._loader: Loader | None = None
        self.sparse = False
        """Whether a computed shard gave a sparse gradient."""
        if plan.cfg.init_from is not None:
            self.load(starting_weights(plan.cfg, report=lambda _: None))

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._replica.model

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers, named as a checkpoint names them."""
        params = {f"param/{name}": param.detach().clone() for name, param in self.params.items()}
        return params | {f"buffer/{name}": buffer.clone() for name, buffer in self._buffers.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers that a checkpoint holds, by canonical name."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the parameters and buffers of a checkpoint."""
        for name, param in self.params.items():
            param.copy_(tensors[f"param/{name}"])
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[f"buffer/{name}"])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open the data for steps that are requested in ascending order."""
        plan = self.plan
        self._loader = loader_of(plan, self._replica.device, lambda step: tuple(range(plan.batch.num_shards(step))))
        try:
            yield
        finally:
            self._loader.close()
            self._loader = None

    def shards(self, step: int, *, num_replicas: int = 1, shard_of_keys: int | None = None) -> Iterator[Shard]:
        """Yield the results of the shards of a step, from the loaded parameters and buffers.

        Each shard draws its own random numbers, or those of `shard_of_keys`.
        """
        assert self._loader is not None
        plan = self.plan.batch
        batches = self._loader.fetch(Ticket(step, tuple(range(plan.num_shards(step)))))
        before = self.buffers()
        numerics = self.plan.components.numerics
        for shard, batch in enumerate(batches):
            self._restore(before)
            gradient, weight, after = self._shard(step, shard if shard_of_keys is None else shard_of_keys, batch)
            lane = shard % numerics.lanes if numerics.reproducible else shard
            yield Shard(
                gradient=gradient,
                weight=weight,
                size=plan.shard_size(step, shard),
                replica=lane % num_replicas,
                buffers=after,
            )
        self._restore(before)

    def evidence(self, step: int, *, num_replicas: int) -> StepEvidence:
        """Return the evidence of a step, at the loaded parameters and buffers."""
        shards = tuple(self.shards(step, num_replicas=num_replicas))
        return StepEvidence(
            step=step,
            shards=shards,
            num_replicas=num_replicas,
            buffers=self.buffers(),
            strides={name: param.stride() for name, param in self.params.items()},
            drawn_alike=lambda: tuple(self.shards(step, num_replicas=num_replicas, shard_of_keys=0)),
        )

    def _shard(self, step: int, keyed_as: int, batch: Any) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
        replica, objective = self._replica, self.plan.components.objective
        replica.keys.enter(step=step, shard=keyed_as, objective=objective)
        loss = objective.loss(replica.model, batch)
        after = self.buffers()
        total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra * loss.weight
        grads = torch.autograd.grad(total, list(self.params.values()), allow_unused=True)
        self.sparse = self.sparse or any(grad is not None and grad.is_sparse for grad in grads)
        found = {
            name: grad.to_dense() if grad.is_sparse else grad
            for name, grad in zip(self.params, grads, strict=True)
            if grad is not None
        }
        return found, float(loss.weight), after

    @torch.no_grad()
    def _restore(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(buffers[name])
