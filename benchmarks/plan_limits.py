"""Train 30 configs with less memory than planned and with more: what the plan refuses must run out, the rest train.

python benchmarks/plan_limits.py [--every 1] [--only TEXT] [--jobs 2]

Each training begins as a fork under a limit of the private memory of every process (RLIMIT_DATA): what a process of the
same training with small tensors has beside them, plus what the planned machine leaves for tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Freed tensors go back to the system at once; one thread, because threads have stacks."""
if __name__ == "__main__" and not SETTINGS.items() <= os.environ.items():
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})

from benchmarks import report
from trainkit import api
from trainkit.config.composition import Composition
from trainkit.config.grammar import replacing
from trainkit.config.targets.allowed import allow_packages
from trainkit.run.estimates.hardware import hardware_of
from trainkit.run.estimates.memory import PROCESS_BYTES, DeviceMemory, device_memory, verdict_of
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.trained.build import meta_model

SHORT = (
    "recipe=null", "logger=[]", "callbacks=[own_bytes]", "checkpoint.export=false", "steps=2", "epochs=null",
    "quiet=true", "eval.every_epochs=null", "eval.every_steps=null",
    "data.num_samples=512", "data.val_samples=8", "checkpoint.background=false",
)  # fmt: skip
MODELS = {
    "mlp": (
        "model=mlp", "data=synthetic", "model.in_features=64", "model.hidden=[2400,2400,2400]",
        "batch.global_size=512",
    ),
    "gpt": (
        "model=gpt", "objective=language_modelling", "data=synthetic_tokens", "data.context=128", "model.context=128",
        "data.vocab_size=512", "model.vocab_size=512", "model.width=192", "model.num_layers=4",
        "batch.global_size=32",
    ),
    "convnet": (
        "model=convnet", "data=synthetic", "data.shape=[3,48,48]", "model.in_channels=3", "model.image_size=48",
        "model.widths=[48,96,192]", "batch.global_size=160",
    ),
    "resnet": (
        "model=resnet", "model.depth=18", "data=synthetic", "data.shape=[3,64,64]", "data.num_classes=100",
        "model.num_classes=100", "batch.global_size=16",
    ),
}  # fmt: skip
TINY = {
    "mlp": ("model.hidden=[8,8,8]",),
    "gpt": ("model.width=8", "model.num_layers=2"),
    "convnet": ("model.widths=[8,8,8]",),
    "resnet": ("data.shape=[3,32,32]",),
}
"""What makes a model, or the tensors that it computes, small."""
ALONE = "supervisor.max_restarts=0"
STRATEGIES = {
    "one_device": (),
    "device_map": ("strategy=device_map",),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2", "strategy.reduce=backend", ALONE),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2", ALONE),
    "pipeline": ("strategy=pipeline", "strategy.stages=2", ALONE),
}
"""The limit is one of private memory, so no gradients are reduced through shared memory."""
NEAR, FAR = (0.85, 1.15), (0.6, 1.5)
"""Memory for tensors below and above the planned peak, as multiples of it."""
SLACK = 8 * 2**20
"""Bytes for what differs between the processes of two trainings beside their tensors."""
OF_MEMORY = ("memory", "bad_alloc", "alloc")
"""Words of the errors of a process without memory."""
LONGEST_S = 900
"""Seconds after which a training is ended, which then counts as neither."""
Row = tuple[list[str], list[tuple[str, str]]]
"""Cells of the table, and what plan and training find on the machine with less memory and on the one with more."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and the two machines that it is planned for."""

    model: str
    strategy: str
    overrides: tuple[str, ...] = ()
    """Further arguments."""
    factors: tuple[float, float] = NEAR

    @property
    def arguments(self) -> list[str]:
        """All arguments of the training."""
        return list(replacing([*SHORT, *MODELS[self.model], *STRATEGIES[self.strategy]], *self.overrides))

    @property
    def kind(self) -> tuple[str, str]:
        """What decides the memory of a process beside its tensors."""
        return self.model, self.strategy


def cases() -> list[Case]:
    """Return the 30 trainings; a plan of some 200 to 400 MiB each."""
    sgd, momentum = "optimizer=sgd", "optimizer.momentum=0.9"
    full, mixed, half = "activation_checkpointing=full", "precision=bf16_mixed", "precision=bf16"
    copied, more = "checkpoint.background=true", "batch.global_size=96"
    choices: dict[tuple[str, str], list[tuple[str, ...]]] = {
        ("mlp", "one_device"): [(), (sgd,), (sgd, momentum), ("batch.micro_size=128",), (half,), (copied,)],
        ("gpt", "one_device"): [(), (full,), (mixed,), ("batch.micro_size=12",), (sgd, "model.width=256")],
        ("convnet", "one_device"): [(), ("batch.micro_size=80", sgd)],
        ("resnet", "one_device"): [(), (full, "batch.micro_size=8")],
        ("mlp", "mirrored"): [(), ("batch.micro_size=128", sgd)],
        ("gpt", "mirrored"): [(full, more), (mixed,)],
        ("convnet", "mirrored"): [()],
        ("mlp", "fsdp"): [(), (sgd, momentum)],
        ("gpt", "fsdp"): [(), (full, more)],
        ("convnet", "fsdp"): [()],
        ("mlp", "pipeline"): [("batch.micro_size=128",)],
        ("gpt", "pipeline"): [("batch.micro_size=16", more), (full, "batch.micro_size=32", more)],
        ("gpt", "device_map"): [()],
        ("resnet", "device_map"): [(sgd,)],
    }
    listed = [(model, strategy, keys) for (model, strategy), lists in choices.items() for keys in lists]
    return [
        Case(model=model, strategy=strategy, overrides=keys, factors=FAR if number % 3 == 2 else NEAR)
        for number, (model, strategy, keys) in enumerate(listed)
    ]


def composed(arguments: Sequence[str]) -> Composition:
    """Return the config of arguments that may name the callback of this benchmark."""
    return api.compose(arguments, config_dirs=[ROOT / "benchmarks/conf"], packages=["benchmarks"])


def planned(arguments: Sequence[str], *, evaluates: bool = True) -> tuple[RunPlan, DeviceMemory]:
    """Return the plan of a config, and its memory, with that of evaluations or without."""
    run = composed(arguments)
    with allow_packages(run.packages):
        plan = make_plan(run.cfg)
        model = meta_model(plan.cfg)
        plan = plan.resolved(lambda: model)
        return plan, device_memory(plan, model, evaluates=evaluates)


def refused(case: Case, room: int) -> bool:
    """Return whether the plan finds too small a machine that has so much room for the tensors of each task."""
    tasks = len(planned(case.arguments)[0].tasks)
    gib = tasks * (PROCESS_BYTES + room) / 2**30
    plan, memory = planned([*case.arguments, "hardware=laptop", f"hardware.memory_gib={gib}"])
    hardware = hardware_of(plan.cfg)
    assert hardware is not None
    return verdict_of(plan, memory, hardware).fits is False


@contextlib.contextmanager
def trained(arguments: Sequence[str], limit: int | None) -> Iterator[tuple[int, Path]]:
    """Train in a fork, under a limit; yield its status, and the folder with `run/` and what it printed in `output`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.chdir(name)
                output = os.open("output", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                signal.alarm(LONGEST_S)
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
                api.train(composed([*arguments, "hydra.run.dir=run"]))
                code = 0
            except BaseException as error:  # noqa: BLE001 - a process without memory may fail in any way
                with contextlib.suppress(BaseException):
                    print(type(error).__name__, error, flush=True)
            os._exit(code)
        yield os.waitpid(child, 0)[1], Path(name)


def own_bytes_of(model: str, strategy: str) -> int:
    """Return the most private memory of a rank of a training with small tensors, without these."""
    small = (*TINY[model], "batch.global_size=8", "batch.micro_size=4")
    with trained(replacing([*SHORT, *MODELS[model], *STRATEGIES[strategy]], *small), None) as (status, folder):
        assert status == 0, (folder / "output").read_text()
        return max(int(path.read_text()) for path in folder.glob("run/own-*"))


def outcome(arguments: Sequence[str], limit: int) -> str:
    """Return `trains`, `runs out`, or the end of what a training has printed that failed otherwise."""
    with trained(arguments, limit) as (status, folder):
        if status == 0:
            return "trains"
        printed = [path.read_text(errors="replace") for path in (folder / "output", *folder.glob("run/logs/*"))]
    text = "\n".join(printed)
    return "runs out" if any(phrase in text.lower() for phrase in OF_MEMORY) else text.strip()[-300:]


def row_of(case: Case, process_bytes: int) -> Row:
    """Return what plan and training find on each of the two machines."""
    most = planned(case.arguments, evaluates=False)[1].most  # a run that its callback ends evaluates nothing
    outcomes = []
    for factor in case.factors:
        room = int(most * factor)
        verdict = "refused" if refused(case, room) else "fits"
        outcomes.append((verdict, outcome(case.arguments, process_bytes + room + SLACK)))
    texts = [f"{factor}: {verdict}, {does}" for factor, (verdict, does) in zip(case.factors, outcomes, strict=True)]
    arguments = f"`{' '.join(case.overrides)}`" if case.overrides else ""
    cells = [case.model, case.strategy, arguments, f"{most / 2**20:.0f}", *texts]
    print(" | ".join(cells), flush=True)
    return cells, outcomes


def rows_of(alike: Sequence[Case]) -> list[Row]:
    """Return the rows of trainings of one kind."""
    process_bytes = own_bytes_of(*alike[0].kind)
    print(f"{alike[0].kind}: {process_bytes / 2**20:.0f} MiB a process", file=sys.stderr)
    return [row_of(case, process_bytes) for case in alike]


def main() -> int:
    """Measure and print; without a selection, write the table. Return 1 where plan and training differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="of the trainings, each so many")
    parser.add_argument("--only", default="", help="those whose model, strategy or arguments contain this")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in " ".join([case.model, case.strategy, *case.overrides])]
    kinds = groupby(chosen[:: options.every], key=lambda case: case.kind)
    groups = [list(alike) for _, alike in kinds]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        api.train(api.compose(["recipe=digits", *SHORT[1:2], "callbacks=[]", "steps=2", "epochs=null", "quiet=true"]))
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        rows = [row for group_rows in pool.imap(rows_of, groups) for row in group_rows]
    counts = Counter(pair for _, outcomes in rows for pair in outcomes)
    if options.every == 1 and not options.only:
        write([cells for cells, _ in rows], counts)
    else:
        print(dict(counts))
    return int(counts.keys() != {("refused", "runs out"), ("fits", "trains")})


def write(rows: Sequence[Sequence[str]], counts: Counter[tuple[str, str]]) -> None:
    """Write the result."""
    ends = ["runs out", "trains", *sorted({does for _, does in counts} - {"runs out", "trains"})]
    confusion = [[verdict, *(str(counts[verdict, does]) for does in ends)] for verdict in ("refused", "fits")]
    head = ["model", "strategy", "arguments", "planned MiB", "less memory: plan, training", "more: plan, training"]
    report.write(
        "plan_limits",
        "Trainings with less memory than the plan needs, and with more",
        "python benchmarks/plan_limits.py",
        f"{report.table(['plan', *ends], confusion)}\n\n"
        "Each training is planned and tried on two machines. The memory for tensors of each process is the planned "
        f"peak times {NEAR[0]} and {NEAR[1]}, and for every third training times {FAR[0]} and {FAR[1]}. The limit is "
        "one of private memory (RLIMIT_DATA) of each process: what a process of the same training with small tensors "
        f"has beside them, plus that memory and {SLACK >> 20} MiB. Two steps and the checkpoint at the end; two "
        f"processes under `mirrored`, `fsdp` and `pipeline`.\n\n{report.table(head, rows)}",
    )


if __name__ == "__main__":
    sys.exit(main())
