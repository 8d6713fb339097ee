"""The transfers between the ranks of a strategy in a step: the bytes of each, by sender and receiver."""

from trainkit.strategies.traffic.dry_run import CollectiveCall, DryRun, ModuleCall, TensorFacts
from trainkit.strategies.traffic.flows import Flows, all_gather, all_reduce, joined, reduce_scatter, times
from trainkit.strategies.traffic.transfers import (
    DescribesTraffic,
    StepCut,
    Transfer,
    WorkShare,
    bubble_of,
    exchanged_elements,
    precision_of,
    ranks_a_host,
    ranks_of,
    traffic_of,
    work_share,
)

__all__ = [
    "CollectiveCall",
    "DescribesTraffic",
    "DryRun",
    "Flows",
    "ModuleCall",
    "StepCut",
    "TensorFacts",
    "Transfer",
    "WorkShare",
    "all_gather",
    "all_reduce",
    "bubble_of",
    "exchanged_elements",
    "joined",
    "precision_of",
    "ranks_a_host",
    "ranks_of",
    "reduce_scatter",
    "times",
    "traffic_of",
    "work_share",
]
