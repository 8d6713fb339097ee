"""Compare the memory that `trainkit plan` predicts with what torch's profiler counts, on every rank of a training.

python benchmarks/plan_memory.py [--only TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

from benchmarks import report
from trainkit import api
from trainkit.errors import TrainkitError
from trainkit.run.estimates.memory import DeviceMemory, part_memories
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.base import StepOutcome
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.reducers.shared_memory import SharedMemorySegment
from trainkit.trained.build import meta_model
from trainkit.trainer.events import Callback, Run

COMMON = (
    "logger=[]", "callbacks=[peak_bytes]", "checkpoint.export=false", "stop_at_step=5", "quiet=true",
    "eval.every_epochs=null", "eval.every_steps=null",
)  # fmt: skip
IMAGES = ("data=synthetic", "data.num_samples=512", "data.val_samples=8")
RECIPES = {
    "digits": ("recipe=digits", "model.hidden=[1024,1024]", "batch.global_size=512", "batch.micro_size=128"),
    "cifar10": ("recipe=cifar10", *IMAGES, "data.shape=[3,32,32]", "batch.global_size=64", "batch.micro_size=16"),
    "python_source": ("recipe=python_source", "data.max_bytes=100000", "batch.micro_size=4"),
    "resnet50": (
        "recipe=resnet50_imagenet", *IMAGES, "data.shape=[3,96,96]", "data.num_classes=1000", "batch.global_size=16",
        "batch.micro_size=4", "loader.num_workers=0",
    ),
}  # fmt: skip
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2"),
    "device_map": ("strategy=device_map",),
    "tensor_parallel": ("strategy=tensor_parallel", "strategy.degree=2"),
}
CHECKPOINTING = {
    "none": (),
    "selective": ("activation_checkpointing=selective",),
    "full": ("activation_checkpointing=full",),
}


@dataclass
class _Recording:
    profile: profile | None = None
    at_start: int = 0
    original: Any = None
    updated: list[Tensor] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    lasting: int = 0


@dataclass(frozen=True, kw_only=True)
class PeakBytes(Callback):
    """Writes `bytes-RANK.json` into the run folder: the lasting bytes of an update, and the peak of two steps."""

    observes: ClassVar[bool] = True
    prints: ClassVar[bool] = False

    _recording: _Recording = field(default_factory=_Recording, init=False, repr=False, compare=False)

    def run_start(self, run: Run) -> None:
        """Count what is alive when an optimizer steps."""
        recording, step = self._recording, OptimizerStepper.step

        def counted(stepper: OptimizerStepper, grads: Sequence[Tensor | None], lr_factor: float) -> None:
            step(stepper, grads, lr_factor)
            state = (value for slots in stepper.optimizer.state.values() for value in slots.values())
            params = [param for group in stepper.optimizer.param_groups for param in group["params"]]
            recording.updated = params
            recording.lasting = bytes_of([*grads, *state, *params, *run.model.parameters()])

        recording.original = step
        OptimizerStepper.step = counted  # type: ignore[method-assign, assignment]

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Record the third and the fourth step."""
        if run.state.step == 2:
            gc.collect()
            in_memory = (data.tensors() for data in run.datasets.values() if hasattr(data, "tensors"))
            leaves = (leaf for tensors in in_memory for leaf in tree_iter(tensors))
            data_storages = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            alive = [value for value in gc.get_objects() if isinstance(value, Tensor)]
            alive += [
                *run.model.parameters(),
                *run.model.buffers(),
                *self._recording.updated,
            ]  # not all are collectable
            shared = [value for value in gc.get_objects() if isinstance(value, SharedMemorySegment)]
            parts = sum(segment.total.nbytes * (len(segment.slots) + 1) // len(segment.slots) for segment in shared)
            data_storages |= {storage_of(slot) for segment in shared for slot in (*segment.slots, segment.total)}
            self._recording.at_start = bytes_of(alive, data_storages) + parts
            self._recording.alive = {*map(storage_of, alive)} - data_storages
            self._recording.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._recording.profile.start()
        elif run.state.step == 4 and self._recording.profile is not None:
            self._recording.profile.stop()
            OptimizerStepper.step = self._recording.original  # type: ignore[method-assign]
            peak = self._recording.at_start + largest(self._recording.profile, self._recording.alive)
            counts = {"lasting": self._recording.lasting, "at_start": self._recording.at_start, "peak": peak}
            rank = dist.get_rank() if dist.is_initialized() else 0
            (run.folder / f"bytes-{rank}.json").write_text(json.dumps(counts))


def storage_of(tensor: Tensor) -> int:
    """Return a number for the memory of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage().data_ptr()) if local.layout is torch.strided else 0


def bytes_of(tensors: Iterable[object], skip: Iterable[int] = ()) -> int:
    """Return the bytes of the storages of CPU tensors that are not known yet, each storage once."""
    counted, total = {0, *skip}, 0
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and storage_of(tensor) not in counted:
            counted.add(storage_of(tensor))
            total += getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes()
    return total


def largest(recorded: profile, alive: set[int]) -> int:
    """Return the most bytes that were allocated at once, beyond those at the start, which are at known addresses.

    The profiler sees the main thread alone. What gloo copies there, it frees in a thread of its own: such a copy counts
    until the next allocation, which follows the collective. An address that is allocated anew was freed before.
    """
    changes, live = [], {*alive}
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    for event in events_of(recorded.profiler.kineto_results.experimental_event_tree()):
        kind, details = event.typed
        if str(kind).endswith("Allocation"):
            changes.append((event.start_time_ns, details.alloc_size, details.ptr, is_of_gloo(event)))
    sizes: dict[int, int] = {}
    copies: list[int] = []
    allocated = most = 0
    for _, change, address, copied in sorted(changes):
        if change > 0:
            freed = [address] if copied else [address, *copies]
            allocated += change - sum(sizes.pop(pointer, 0) for pointer in freed)
            copies = [*copies, address] if copied else []
            live.add(address)
            sizes[address] = change
        elif address not in live:
            continue  # it was alive at the start and is not counted there, or a copy of gloo
        else:
            live.discard(address)
            sizes.pop(address, None)
            allocated += change
        most = max(most, allocated)
    return most


def is_of_gloo(event: Any) -> bool:
    """Return whether an allocation is part of a collective."""
    while event is not None:
        if str(event.name).startswith("c10d::"):
            return True
        event = event.parent
    return False


def events_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield events and all events below them."""
    pending = list(roots)
    while pending:
        event = pending.pop()
        yield event
        pending.extend(event.children)


def planned(arguments: Sequence[str]) -> tuple[list[DeviceMemory], bool]:
    """Return the memory that the plan gives, of each rank of a replica, and whether each rank copies its state."""
    plan = make_plan(api.compose(arguments).cfg)
    model = meta_model(plan.cfg)
    facts = plan.components.strategy.facts_in(plan.context)
    return part_memories(plan.resolved(lambda: model), model), facts.is_sharded


def measured(arguments: Sequence[str]) -> list[dict[str, int]]:
    """Return the counts of each rank."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        options = {"config_dirs": [ROOT / "benchmarks/conf"], "packages": ["benchmarks"]}
        api.train(api.compose([*arguments, *COMMON, "hydra.run.dir=run"], **options))  # type: ignore[arg-type]
        count = len([*Path().glob("run/bytes-*.json")])
        return [json.loads(Path(f"run/bytes-{rank}.json").read_text()) for rank in range(count)]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = []
    for recipe, overrides in RECIPES.items():
        for strategy, placed in STRATEGIES.items():
            for policy, more in CHECKPOINTING.items():
                name = f"{recipe}; {strategy}; {policy}"
                if options.only not in name:
                    continue
                rows.append([recipe, strategy, policy, *cells([*overrides, *placed, *more])])
                print(rows[-1], flush=True)
    if not options.only:
        write(rows)


def cells(arguments: Sequence[str]) -> list[str]:
    """Return what was measured and predicted, as MiB and ratios; the refusal where the config is not legal."""
    try:
        parts, is_sharded = planned(arguments)
        if parts[0].step is None:
            return ["-", "-", "-", "-", *parts[0].notes()]
        ranks = [
            Compared.of(rank, parts[rank % len(parts)], counts, copies=is_sharded or rank == 0)
            for rank, counts in enumerate(measured(arguments))
        ]
    except TrainkitError as error:
        return ["-", "-", "-", "-", str(error).strip().splitlines()[-1][:100]]
    lasting = max(ranks, key=lambda rank: abs(rank.lasting - 1))
    worst = max(ranks, key=lambda rank: abs(rank.ratio - 1))
    return [
        f"{lasting.lasting:.3f}",
        str(worst.rank),
        f"{worst.measured / 2**20:.1f}",
        f"{worst.planned / 2**20:.1f}",
        f"{worst.ratio:.3f}",
    ]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The plan and the counts of a rank."""

    rank: int
    lasting: float
    """Planned over measured bytes of parameters, gradients and the optimizer."""
    planned: int
    """Bytes at the peak."""
    measured: int

    @property
    def ratio(self) -> float:
        """Planned over measured bytes at the peak."""
        return self.planned / self.measured

    @classmethod
    def of(cls, rank: int, plan: DeviceMemory, counts: Mapping[str, int], *, copies: bool) -> Compared:
        """Compare a rank with its part of the plan; `copies`: whether it has a copy for checkpoints."""
        state = plan.static
        lasting = state.parameter_bytes + state.gradient_bytes + (state.optimizer_bytes or 0)
        peak = (plan.step or 0) - (0 if copies else state.staging_bytes)
        return cls(rank=rank, lasting=lasting / counts["lasting"], planned=peak, measured=counts["peak"])


def write(rows: Sequence[Sequence[str]]) -> None:
    """Write the result."""
    head = [
        "recipe",
        "strategy",
        "checkpointing",
        "lasting planned / measured",
        "rank",
        "peak MiB",
        "planned MiB",
        "ratio",
    ]
    report.write(
        "plan_memory",
        "Memory that `trainkit plan` predicts, against torch's profiler",
        "python benchmarks/plan_memory.py",
        "Each rank is compared with its own part of the plan; a row has the two ratios that are furthest from 1, and "
        "the rank with that of the peak. Lasting: parameters, gradients and optimizer state when the optimizer steps. "
        "Peak: tensors alive at the start of the third step, and the most allocated beyond them in two steps; of "
        "memory that ranks share, each has an equal part.\n\n" + report.table(head, rows),
    )


if __name__ == "__main__":
    main()
