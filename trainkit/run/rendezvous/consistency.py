"""Refuse processes of an external launch that were started with different configs or plan different runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from trainkit.config.composition import dotted, leaves
from trainkit.config.schema import RunConfig
from trainkit.config.secrets import redacted
from trainkit.errors import ConfigError, Problem, yaml_text
from trainkit.run.planning.plan import RunPlan
from trainkit.run.rendezvous.barrier import ProcessBarrier

_OWN_KEYS: Final = (("cluster", "task"),)
"""Keys that differ between the processes of a launch by design."""


def config_digest(cfg: RunConfig) -> dict[str, Any]:
    """Return what processes compare of a config, as JSON: its values without secrets, and a hash of them."""
    values = {dotted(path): value for path, value in leaves(redacted(cfg.to_dict())[0]) if path not in _OWN_KEYS}
    digest = hashlib.sha256(json.dumps(sorted(values.items()), default=str).encode()).hexdigest()
    return {"digest": digest, "values": values}


def config_mismatches(
    ours: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], *, origin: str = ""
) -> list[Problem]:
    """Return one problem for each key in which processes differ."""
    differing = {place: other for place, other in others.items() if other["digest"] != ours["digest"]}
    return [
        Problem(
            key=key,
            value=ours["values"].get(key),
            rule=f"{place} has {yaml_text(other['values'].get(key))}. Start all alike.",
            origin=origin,
        )
        for place, other in differing.items()
        for key in sorted({**ours["values"], **other["values"]})
        if ours["values"].get(key) != other["values"].get(key)
    ]


def check_same_config(barrier: ProcessBarrier, cfg: RunConfig) -> None:
    """Compare the configs of all processes; raise for each differing key and rank, before anything is written."""
    ours, *others = barrier.all_gather_object(config_digest(cfg))
    places = [barrier.launch.place_of(rank) for rank in barrier.ranks]
    problems = config_mismatches(ours, dict(zip(places[1:], others, strict=True)), origin=places[0])

    def refuse() -> None:
        if problems:
            raise ConfigError(problems)

    barrier.run_on_rank0_and_broadcast(refuse)


def check_same_plan(barrier: ProcessBarrier, plan: RunPlan) -> None:
    """Refuse hosts whose devices differ: they would plan different runs."""
    ranks_per_process = len(plan.tasks) // barrier.launch.num_ranks
    own = plan.tasks[barrier.launch.rank * ranks_per_process]
    plans = barrier.all_gather_object({"replicas a process": ranks_per_process, "device": own.device.partition(":")[0]})

    def refuse() -> None:
        problems = [
            Problem(
                key=f"strategy, {name}",
                value=value,
                rule=f"{barrier.launch.place_of(rank)} has {theirs[name]}. All need the same.",
                origin=barrier.launch.place_of(0),
            )
            for rank, theirs in zip(barrier.ranks, plans, strict=True)
            for name, value in plans[0].items()
            if theirs[name] != value
        ]
        if problems:
            raise ConfigError(problems)

    barrier.run_on_rank0_and_broadcast(refuse)
