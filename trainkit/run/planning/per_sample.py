"""Find buffers that hold state of single samples, from the shards of the first steps, before anything starts.

The hidden state of a recurrent net, `self.hidden[:, column] = ...`, is such a buffer. Each shard writes its own
part of it, and an average over shards would mix the new values of one shard with the old ones of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.data.splits import read_sample
from trainkit.errors import Problem
from trainkit.numerics.batch import Positions, Ticket
from trainkit.objectives.linear_cross_entropy import scores_kept
from trainkit.run.planning.build import build_model, build_objective
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.core.buffers import sample_dims_of, written_indices

_STEPS: Final = 3
"""Steps whose shards are looked at; random indices of one step may be different by chance."""
_SHARDS: Final = 2
"""Shards of each step that are run."""
_SAMPLES: Final = 8
"""Samples of each shard that are run."""


def per_sample_problems(plan: RunPlan, names: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of buffers whose parts the shards of a step write, and which are not declared; or which are
    declared, and of which two shards write the same part.

    Args:
        plan: the run.
        names: buffers that a forward pass updates.
    """
    steps = [step for step in range(min(_STEPS, plan.num_steps)) if plan.batch.num_shards(step) > 1]
    found = [_changes(plan, step, names) for step in steps]
    dims, kind = sample_dims_of(build_model(plan.cfg)), plan.cfg.model.get("_target_")
    for name in names if found else ():
        declared = dims.get(name)
        if declared is not None and any(_meet(changes[name], declared) for changes in found):
            rule = (
                f"declares dim {declared} of the buffer {name} as that of the samples, and two shards of one of the "
                "first steps write the same index of it. Give each sample of a step an index of its own "
                "(docs/recurrent-state.md#data)."
            )
            yield Problem(key="model._target_", value=kind, rule=rule)
        if name in dims:
            continue
        for dim in range(found[0][name][0][1].dim()):
            if all(_is_per_sample(changes[name], dim) for changes in found):
                owner, leaf = name.rpartition(".")[::2]
                rule = (
                    f"has the buffer {name}, and the shards of a step write different indices of its dim {dim}, as "
                    f"state of single samples. Buffers are averaged over shards: declare it in the class of "
                    f"{owner or 'the model'}, sample_dims = {{{leaf!r}: {dim}}}, and it is not averaged; or "
                    f"{{{leaf!r}: None}} if it is no such state (docs/recurrent-state.md)."
                )
                yield Problem(key="model._target_", value=kind, rule=rule)
                break


Change = tuple[int, Tensor, Tensor]
"""Samples of a shard, and a buffer before and after its forward pass."""


def _changes(plan: RunPlan, step: int, names: Collection[str]) -> Mapping[str, Sequence[Change]]:
    """Return what the first shards of a step do to buffers; each starts from the same ones."""
    hooks, dataset, cfg = plan.components.hooks, plan.components.datasets["train"], plan.cfg
    positions = Positions(plan.batch, hooks.order(dataset, plan.batch, seed=cfg.seed, shuffle=cfg.loader.shuffle))
    precision, found = plan.components.precision, {name: list[Change]() for name in names}
    for shard in range(_SHARDS):
        model, objective = precision.adapt(build_model(cfg)), build_objective(cfg)
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if name in found}
        places = positions.indices(Ticket(step, (shard,)))[:_SAMPLES].tolist()
        samples = [read_sample(dataset, place) for place in places]
        batch = to_device(hooks.collate_function(samples, places), torch.device("cpu"))
        kept = scores_kept() if objective.takes_hidden else nullcontext()
        with torch.enable_grad(), kept, precision.autocast(["cpu"]):
            objective.loss(model, batch)
        after = dict(model.named_buffers())
        for name, start in before.items():
            found[name].append((len(places), start, after[name]))
    return found


def _is_per_sample(changes: Sequence[Change], dim: int) -> bool:
    """Return whether shards write different indices of a dim, each at most as many as it has samples."""
    counts = [int(written_indices(start, after, dim).sum()) for _, start, after in changes]
    fits = all(0 < count <= size for count, (size, _, _) in zip(counts, changes, strict=True))
    return fits and not _meet(changes, dim)


def _meet(changes: Sequence[Change], dim: int) -> bool:
    """Return whether two shards write the same index of a dim."""
    written = torch.stack([written_indices(start, after, dim) for _, start, after in changes])
    return bool((written.sum(0) > 1).any())
