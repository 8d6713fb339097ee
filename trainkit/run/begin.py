"""Begin a run: find the state to continue, create its folder, and write its first files."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from trainkit.cluster.host import num_cores
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.identity import Difference, difference, fingerprint, other_training, run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import targets_in
from trainkit.data.splits import size_of
from trainkit.errors import CheckpointError, ConfigError, Problem, StorageError, UnreadableError, refuse, together
from trainkit.extras import DISTRIBUTION
from trainkit.files import Free, lacking, num_bytes, reporting, storage_error, write_atomically, write_json_atomically
from trainkit.numerics.batch import BatchPlan
from trainkit.redaction import mask, redacted_argument
from trainkit.run.estimates.this_machine import host_bytes
from trainkit.run.folder.continued import bring_earlier_steps, refuse_absent_weights
from trainkit.run.folder.run_folder import FencingToken, RunFolder
from trainkit.run.folder.status import read_status
from trainkit.run.planning.build import average_of, build_components, build_schedule, num_steps_of, rates_of
from trainkit.run.planning.memory import checkpoint_bytes, model_bytes, refuse_small_host
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import coupling_of, cut_notes, is_never_given, model_notes
from trainkit.run.planning.plan import ChooseWorkers, RunPlan, make_plan, refuse_open_workers, with_workers
from trainkit.run.process.setup import variables
from trainkit.run.record import RunRecord, first_command, recorded_run
from trainkit.run.session.checkpointer import retention_of
from trainkit.run.session.restore import refuse_own_losses
from trainkit.trained.build import meta_model
from trainkit.trainer.events import ended_hooks
from trainkit.trainer.manifest import MANIFEST, list_complete, read_manifest
from trainkit.trainer.ownership import uncontested

_FEWER: Final = "keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_best)"
_ELSEWHERE: Final = "choose a folder on another file system (hydra.run.dir=FOLDER)"

Result = dict[str, Any] | None
"""Content of result.json on rank 0; None on other ranks."""

Job = Callable[[Path, Callable[[], Result]], Result]
"""Function that calls the training in its folder, for example within the job context that Hydra sets up."""


def refuse_lack_of_room(plan: RunPlan, model: nn.Module, folder: RunFolder | None, run_dir: Path | None) -> None:
    """Refuse a run whose checkpoints do not fit on the file system, before anything is written or started.

    Raises:
        ConfigError: rank 0 cannot build the model in the memory of this host.
        StorageError: there is too little free space.
    """
    refuse_small_host(plan, model, host_bytes())
    if plan.is_measurement:
        return
    settings = plan.cfg.checkpoint
    num_kept = settings.keep_last + settings.keep_best + int(plan.has_evaluator)
    path = folder.path if folder is not None else run_dir or Path("outputs") / plan.cfg.name
    ends = settings.export and plan.last_step == plan.num_steps
    average = average_of(plan.cfg)
    copies = 1 + bool(settings.keep_best) + (average is not None and average.export)
    exported = model_bytes(plan, model) * copies if ends else 0
    size = checkpoint_bytes(plan, model)
    refuse_small_disk(path, size=size, num_kept=num_kept, steps_left=plan.last_step, exported=exported)


def refuse_small_disk(folder: Path, *, size: int, num_kept: int, steps_left: int, exported: int = 0) -> None:
    """Refuse a run whose checkpoints do not fit on the file system of its folder, before its first step.

    Args:
        folder: the run folder, which may not exist yet.
        size: bytes of a checkpoint.
        num_kept: number of checkpoints kept.
        steps_left: remaining steps, an upper bound of the checkpoints to write.
        exported: bytes of the model that is written at the end.

    Raises:
        StorageError: there is too little space for the kept checkpoints and the one that is written in addition.
    """
    root = folder / "checkpoints"
    existing = list_complete(root) if os.path.lexists(root) else []
    existing_bytes = sum(record.num_bytes for checkpoint in existing for record in checkpoint.files.values())
    number = min(num_kept + 1, len(existing) + steps_left)
    needed = max(size * number - existing_bytes, size) + exported
    free = Free.at(folder)
    if lacking(folder, 0, size) == errno.EFBIG:
        raise storage_error(root, OSError(errno.EFBIG, os.strerror(errno.EFBIG)), needed=size)
    if free is None or (free.num_bytes >= needed and free.num_files != 0):
        return
    contents = f"{number} checkpoints of {num_bytes(size)}" if number > 1 else f"a checkpoint of {num_bytes(size)}"
    contents += f", and {num_bytes(exported)} of the model at the end" if exported else ""
    less = f", less the {num_bytes(existing_bytes)} of existing ones" if existing_bytes else ""
    fewer = f", {_FEWER}" if number > 1 else ""
    raise StorageError(
        f"{folder} has too little room for the checkpoints of this run: {num_bytes(needed)} are needed "
        f"({contents}{less}), {free}. Free space there{fewer}, or {_ELSEWHERE}."
    )


BREAKPOINT: Final = "PYTHONBREAKPOINT"
"""The variable of Python that says what `breakpoint()` calls; 0: nothing."""
_SHOWN: Final = 3
"""Number of unreadable folders that the note names."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state from which a run starts."""

    cfg: RunConfig
    """The config; keys left on auto have the values of the run that is continued."""
    folder: RunFolder | None = None
    """The run folder to continue in; None creates a new one."""
    checkpoints: Path | None = None
    """The `checkpoints` folder of another run, or one checkpoint in it, to start from."""
    note: str | None = None
    """One line that describes what is continued."""
    changes: tuple[str, ...] = ()
    """Lines about keys of the training that this start changes."""
    relaunched: bool = False
    """Whether an external launcher has restarted all processes."""


T = TypeVar("T")

CheckStart = Callable[[ResumePoint, RunPlan], None]
"""Function that raises if the loop of this process cannot run a plan from its start; called before files are
written.
"""


def refuse_own_loss(start: ResumePoint, plan: RunPlan) -> None:
    """Refuse to continue a training with losses of a user's own loop by the trainer's loop; rank 0 checks for all.

    Raises:
        ConfigError: the newest checkpoint has steps with such a loss.
    """
    root = start.folder.checkpoints if start.folder is not None else start.checkpoints
    launch = plan.context.launch
    if root is not None and (launch is None or launch.rank == 0):  # others may not see the folder
        refuse_own_losses(root)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run that is asked for."""

    cfg: RunConfig
    """A checked config."""
    run_dir: Path | None = None
    """The run folder; None: a new one below `outputs/<name>`."""
    notes: Sequence[str] = ()
    """Additional lines of the startup summary."""
    launch: LaunchEnvironment | None = None
    """The external launch that this process belongs to; None: this process starts the others itself."""
    is_given: Callable[[str], bool] = is_never_given
    """Whether the user set a key; a given key without effect is refused."""
    check: CheckStart = refuse_own_loss
    """Raises if the loop of this process cannot run a plan; nothing was written."""
    choose_workers: ChooseWorkers | None = None
    """Resolves `loader.num_workers=auto`; None, or in an external launch: it is refused."""

    @property
    def location(self) -> Path:
        """The run folder, or the folder that a new one will be in."""
        return Path("outputs") if self.run_dir is None else self.run_dir


class Agreement:
    """The processes that begin a run together; this base class: one process alone."""

    launch: LaunchEnvironment | None = None
    """The external launch of the processes."""

    @property
    def is_rank0(self) -> bool:
        """Whether this process decides where processes may see different things."""
        return self.launch is None or self.launch.rank == 0

    def find_start(self, cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
        """Return the state from which the run starts, the same in every process."""
        return find_start(cfg, run_dir)

    def everywhere(self, work: Callable[[], T]) -> T:
        """Run a function in every process, and return its result here; if it fails in one, all fail."""
        return work()

    def on_rank0(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Run a function on rank 0, and return its result, or raise its error, everywhere."""
        return work()

    def compare(self, plan: RunPlan) -> None:
        """Refuse processes whose plans differ."""

    @contextmanager
    def lock(self, folder: RunFolder, *, is_new: bool) -> Iterator[int]:
        """Hold the lock of the folder; yields its descriptor."""
        del is_new
        with folder.lock() as descriptor:
            yield descriptor

    def claim(self, folder: RunFolder, start: ResumePoint) -> dict[str, str]:
        """Prepare a locked folder on rank 0 before its first files; return the values that the other ranks need."""
        del folder, start
        return {}

    def fenced(self, folder: RunFolder, claimed: Mapping[str, str]) -> FencingToken | None:
        """Check in every process that it sees the folder that rank 0 began; return the token of the group."""
        del folder, claimed
        return None


@dataclass(frozen=True, kw_only=True)
class BegunRun:
    """A run whose folder is locked and has its initial files."""

    plan: RunPlan
    folder: RunFolder
    resolved: RunConfig
    lock: int | None
    """Descriptor of the lock, in the process that holds it."""
    fence: FencingToken | None
    """Token of the group; None: the lock is enough, because one process alone began the run."""

    @contextmanager
    def recorded(self, *, first: Sequence[str] = ()) -> Iterator[RunRecord]:
        """Record the output and the status in the folder; `first`: lines from before it existed."""
        confirm = uncontested if self.fence is None else self.fence.check
        ended = ended_hooks(self.plan.cfg, self.folder.path, self.folder.read_result)
        with ended, recorded_run(self.folder, confirm=confirm) as record:
            seconds = self.plan.stop_after_s
            record.status.aim_at(self.plan.last_step if seconds is None else None, seconds)
            record.log.write(first)
            if not self.plan.is_measurement:
                record.page.follow(self.resolved)
            record.follow_heartbeat()
            yield record


@contextmanager
def begun(request: RunRequest, agree: Agreement) -> Iterator[BegunRun]:
    """Plan a run, refuse an impossible one, and begin its folder, which is locked inside; collective over `agree`."""
    run_dir, is_given = request.run_dir, request.is_given
    choose_workers = request.choose_workers if agree.launch is None else None  # it starts processes of its own
    start = agree.find_start(request.cfg, run_dir)
    with variables({BREAKPOINT: "0"}):  # a plan calls the model without data

        def planned() -> RunPlan:
            plan = make_plan(start.cfg, launch=agree.launch)
            request.check(start, plan)
            if choose_workers is None:
                refuse_open_workers(start.cfg)
            return plan

        plan = agree.everywhere(planned)
        agree.compare(plan)

        def examined() -> tuple[RunPlan, list[str]]:
            """Return the plan and notes about it; rank 0 refuses what cannot run, and takes the expensive notes."""
            model = meta_model(plan.cfg)
            if not agree.is_rank0:
                return plan, model_notes(plan, model, is_given)
            notes = together(lambda: refuse_misfits(plan, model), then=lambda: model_notes(plan, model, is_given))
            refuse_lack_of_room(plan, model, start.folder, run_dir)
            notes += cut_notes(plan, lambda: coupling_of(plan, model))
            if plan.cfg.loader.num_workers != "auto":
                return plan, notes
            measured, note = with_workers(plan, choose_workers)  # keep it last: it takes some seconds
            return measured, [*notes, note]

        plan, notes = agree.everywhere(examined)
    locks: list[int] = []
    # A run that starts from the checkpoint of another one names it, and has its earlier steps in its own folder.
    source = start.checkpoints
    resolved = plan.cfg if source is None else replace(plan.cfg, resume=str(source))
    with ExitStack() as stack:

        def begin() -> dict[str, str]:
            with reporting(request.location):
                create = partial(RunFolder.create, Path("outputs"), plan.cfg.name)
                folder = start.folder or (create() if run_dir is None else RunFolder.claim(run_dir))
                locks.append(stack.enter_context(agree.lock(folder, is_new=start.folder is None)))
                claimed = agree.claim(folder, start)
                folder.begin()
                note = start.note if source is None else bring_earlier_steps(folder, source, retention_of(plan.cfg))
                shown = [*request.notes, *notes, *([note] if note else []), *start.changes]
                # The files that describe the run are written last: a folder that has them can be resumed.
                write_resolved(folder, resolved)
                write_environment(folder, cfg=plan.cfg, fingerprint=fingerprint(plan.cfg), notes=shown)
                if agree.launch is not None:
                    folder.open_live()  # with the token of the run, before another process writes into it
                stack.callback(folder.release_reserve)
                return {**claimed, "path": str(folder.path.absolute()) if agree.launch else str(folder.path)}

        claimed = agree.on_rank0(begin)
        folder = RunFolder(Path(claimed["path"]))
        try:
            fence = agree.everywhere(lambda: agree.fenced(folder, claimed))
        except ConfigError:
            if agree.is_rank0 and start.folder is None:
                folder.discard()
            raise
        yield BegunRun(plan=plan, folder=folder, resolved=resolved, lock=locks[0] if locks else None, fence=fence)


def find_start(cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
    """Resolve the key `resume`.

    Raises:
        ConfigError: there is nothing to resume at the given path, or the run there is another training; the error names
            every maths key that differs.
        CheckpointError: the file of `init_from` is damaged.
    """
    if cfg.resume in (None, "auto"):
        if cfg.resume is None and cfg.resume_allows:
            rule = "has no effect: no run is resumed."
            raise ConfigError([Problem(key="resume_allows", value=cfg.resume_allows, rule=rule)])
        start = ResumePoint(cfg=cfg) if cfg.resume is None else _auto(cfg, run_dir)
        continues = start.folder is not None and list_complete(start.folder.checkpoints)
        if cfg.init_from is not None and not continues:
            refuse_absent_weights(cfg)
        return start
    path = Path(cfg.resume).expanduser()
    run, checkpoints = (
        (path, path / "checkpoints") if (path / "resolved.yaml").is_file() else (path.parent.parent, path)
    )
    if not (run / "resolved.yaml").is_file() or not (list_complete(checkpoints) or (path / "manifest.json").is_file()):
        rule = "is neither a run folder with a checkpoint nor a checkpoint of one."
        raise ConfigError([Problem(key="resume", value=cfg.resume, rule=rule)])
    adopted, changes = continued(cfg, run, checkpoints)
    return ResumePoint(cfg=adopted, checkpoints=checkpoints, changes=changes)


def _auto(cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
    has_checkpoint = run_dir is not None and bool(list_complete(run_dir / "checkpoints"))
    if run_dir is not None and (has_checkpoint or (run_dir / "resolved.yaml").is_file()):
        folder = RunFolder(run_dir)
        with nullcontext() if has_checkpoint else suppress(ConfigError):  # of another training
            adopted, changes = continued(cfg, run_dir, folder.checkpoints)
            note = _continues(folder) if has_checkpoint else f"resume=auto: a new run in {run_dir}"
            return ResumePoint(cfg=adopted, folder=folder, note=note, changes=changes)
    root = Path("outputs") / cfg.name if run_dir is None else run_dir.parent
    unread: list[str] = []
    for file in sorted(root.glob("*/resolved.yaml"), key=lambda file: file.lstat().st_mtime, reverse=True):
        folder = RunFolder(file.parent)
        try:
            earlier = run_config(file.parent)
            adopted = replace(adopt(cfg, earlier), changes=cfg.changes)
            unfinished = list_complete(folder.checkpoints) and read_status(folder).state != "finished"
            if not unfinished or fingerprint(adopted) != fingerprint(earlier):
                continue
        except (ConfigError, CheckpointError, UnreadableError):  # of another run: it must not prevent training
            unread.append(f"{folder.path} cannot be read and is skipped")
            continue
        status = read_status(folder)
        if status.is_running and not status.note:  # on another host it may have been killed: that is not known
            rule = (
                f"{folder.path}, the newest unfinished run of this training, {status.summary()}. Wait until it has "
                "ended, stop it, or leave out resume=auto for another run."
            )
            raise ConfigError([Problem(key="resume", value="auto", rule=rule)])
        return ResumePoint(cfg=adopted, folder=folder, note="; ".join([_continues(folder), *unread[:_SHOWN]]))
    note = f"resume=auto: no unfinished run of this training in {root}, so a fresh start"
    return ResumePoint(cfg=cfg, note="; ".join([note, *unread[:_SHOWN]]))


def _continues(folder: RunFolder) -> str:
    status = read_status(folder)
    ended = "" if status.state == "unknown" or status.is_running else f", which {status.summary()}"
    return f"resume=auto: continues {folder.path}{ended}"


def adopt(cfg: RunConfig, earlier: RunConfig) -> RunConfig:
    """Set keys left on auto to the values that the earlier run resolved, so that a resume on other devices keeps these
    values.
    """
    batch = cfg.batch
    if batch.micro_size is None and batch.accumulation is None:
        batch = replace(batch, micro_size=earlier.batch.micro_size)
    if batch.global_size is None:
        batch = replace(batch, global_size=earlier.batch.global_size, accumulation=None)
    loader = cfg.loader
    if loader.num_workers == "auto":
        loader = replace(loader, num_workers=earlier.loader.num_workers)
    return replace(cfg, batch=batch, loader=loader, changes=cfg.changes or earlier.changes, resume_allows=[])


def continued(cfg: RunConfig, run: Path, checkpoints: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config with which a run is continued, and lines about what it changes; refuse another training.

    The length may change while the learning rates of the steps that the run has done stay what they are: then the
    training is that of the new length from its start. Other changes are allowed by `resume_allows`, and are recorded in
    `changes`: they begin a training with a fingerprint of its own.

    Args:
        cfg: the config to continue with.
        run: the folder of the run.
        checkpoints: its `checkpoints` folder, or the checkpoint to continue from.

    Raises:
        ConfigError: names every key that makes it another training, or that was changed in `resolved.yaml` by hand.
    """
    earlier, allowed = run_config(run), cfg.resume_allows
    cfg = adopt(cfg, earlier)
    if (checkpoints / MANIFEST).is_file():
        step = read_manifest(checkpoints).step
    else:
        step = max((checkpoint.step for checkpoint in list_complete(checkpoints)), default=0)
    schedule_diffs: list[Difference] = []
    others: list[Difference] = []
    for diff in difference(earlier, cfg):
        if diff.matters:
            of_schedule = diff.key.partition(".")[0] in ("epochs", "steps", "stop_after", "schedule", "warmup")
            (schedule_diffs if of_schedule else others).append(diff)
    changes = [diff for diff in others if diff.key == "numerics.reproducible" and diff.left is True]
    problems = other_training([diff for diff in others if diff not in changes], run=run)
    if changes and "not_reproducible" not in allowed:
        rule = f"the run to resume, {run}, is reproducible to the bit. To give this up: --give-up-reproducible"
        problems.append(Problem(key=changes[0].key, value=False, rule=f"{rule} ({_IN_PYTHON}not_reproducible])."))
    lines = ["from here on the run is not reproducible to the bit"] * bool(changes)
    if schedule_diffs and not problems:
        batch = BatchPlan(
            num_samples=size_of(build_components(cfg).datasets["train"]),
            global_size=cfg.batch.global_size or 1,
            micro_size=cfg.batch.micro_size or 1,
            drop_last=cfg.batch.drop_last,
        )
        key, value = ("steps", cfg.steps) if cfg.steps else ("epochs", cfg.epochs)
        if (num_steps := num_steps_of(cfg, batch)) < step:
            rule = f"gives {num_steps:,} steps, and {checkpoints} has {step:,} already. Give a larger one."
            raise ConfigError([Problem(key=key, value=value, rule=rule)])
        old_rates, new_rates = (rates_of(config, batch, build_schedule(config.schedule)) for config in (earlier, cfg))
        before, after = ([entry.rate for entry in optimizers] or [rate] for rate, optimizers in (old_rates, new_rates))
        same = all(old(done) == new(done) for done in range(step) for old, new in zip(before, after, strict=True))
        if same and all(diff.key in ("epochs", "steps") for diff in schedule_diffs):
            lines.append(f"{key}={value}: the learning rates of the {step:,} steps done are the same with this length")
        elif "new_schedule" in allowed:
            changes += schedule_diffs
            rate_text = f": the learning rate goes from {before[0](max(step - 1, 0)):g} to {after[0](step):g}"
            rate_text = rate_text if earlier.stop_after is cfg.stop_after is None else ""
            lines.append(f"from step {step:,} on this is another training, with a new schedule{rate_text}")
        else:
            rule = (
                f"With it, the learning rates of the {step:,} steps done would have been others. To continue with a "
                f"new schedule, as another training that keeps the optimizer and the step: --new-schedule ({_IN_PYTHON}"
                "new_schedule])."
            )
            problems += other_training(schedule_diffs, run=run, remedy=rule)
    refuse(problems)
    recorded = [f"after step {step}: {diff.key}={diff.left} became {diff.right}" for diff in changes]
    return replace(cfg, changes=[*cfg.changes, *recorded]), tuple(lines)


_IN_PYTHON: Final = "in a config: resume_allows=["


_CORE_PACKAGES: Final = ("trainkit", "torch", "numpy", "safetensors", "hydra-core", "omegaconf")
_GIT_TIMEOUT_S: Final = 2.0


def write_resolved(folder: RunFolder, cfg: RunConfig) -> None:
    """Write the config with every value resolved, as plain YAML."""
    import yaml  # noqa: PLC0415 - 20 ms that a worker does not need here

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(cfg.to_dict(), Dumper=dumper, sort_keys=False, allow_unicode=True, width=110)
    write_atomically(folder.resolved, text)


def write_environment(
    folder: RunFolder, *, cfg: RunConfig, fingerprint: str, notes: Sequence[str] = (), argv: Sequence[str] | None = None
) -> None:
    """Write `environment.json`: host, commit, packages, devices, command, seed, fingerprint.

    Costs about 10 ms, a third of it git.
    """
    write_json_atomically(
        folder.environment,
        {
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "argv": [redacted_argument(argument) for argument in (sys.argv if argv is None else argv)],
            "cwd": os.getcwd(),  # noqa: PTH109 - a string is needed
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "git": git_state(),
            "packages": packages(cfg.to_dict()),
            "devices": devices(),
            "seed": cfg.seed,
            "fingerprint": fingerprint,
            "config": cfg.to_dict(),
            "notes": [mask(note) for note in notes],
            **first_command(folder.environment),
        },
    )


def devices() -> dict[str, Any]:
    """Return what of this host decides the bits of a sum: cores and threads, vector instructions, and GPUs."""
    gpus = torch.cuda.device_count()
    return {
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        **({"gpu": torch.cuda.get_device_name(0)} if gpus else {}),
    }


def git_state() -> dict[str, Any] | None:
    """Return commit, branch and whether tracked files of the current folder are changed; None outside a repository."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one too large for the time limit
        return None
    lines = answer.splitlines()
    facts = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "commit": facts.get("branch.oid"),
        "branch": facts.get("branch.head"),
        "dirty": any(not line.startswith("#") for line in lines),
    }


def packages(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that every run uses, and of the packages of its `_target_`s."""
    modules = {target.partition(".")[0] for _, target in targets_in(values) if isinstance(target, str)}
    versions = {}
    for name in dict.fromkeys((*_CORE_PACKAGES, *sorted(modules))):
        try:
            versions[name] = importlib.metadata.version(DISTRIBUTION if name == "trainkit" else name)
        except importlib.metadata.PackageNotFoundError:  # a folder on the path, or a module of another name
            continue
    return versions
