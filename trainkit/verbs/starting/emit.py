"""`trainkit emit ENGINE OVERRIDES`: print the script or manifest that starts the same run on an engine."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainkit.cluster.manifests import ENGINES, ManifestJob, ManifestWriter
from trainkit.cluster.manifests.job import seconds_of
from trainkit.cluster.members import ROLES, member_problems
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.targets.allowed import package_arguments
from trainkit.config.values import nearest
from trainkit.config.yaml_files import config_dir_arguments
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.redaction import mask, variable_of
from trainkit.verbs.support.call import Add, Call, parser_of, whole

if TYPE_CHECKING:
    from trainkit.config.composition import Composition

WORDS: Final = tuple(ENGINES)
"""Possible values of its argument, for completion."""
_MOST_RANKS: Final = 100_000
"""Largest number of processes of one launch, over all hosts."""
_COMMON: Final = ("hosts", "gpus-per-host", "processes-per-host")


def _text(rule: str, accepts: Callable[[str], object]) -> Callable[[str], str]:
    """Return the type of a flag whose text must be accepted."""

    def read(text: str) -> str:
        if not accepts(text):
            raise ArgumentTypeError(rule)
        return text

    return read


def _command(text: str) -> str:
    """Return the command of `--setup`."""
    if mask(text) != text:
        raise ArgumentTypeError("contains a password in a URL. Read it from a file or a variable on the host instead.")
    return _text("must be one line. Put longer text into a script of your own.", str.isprintable)(text)


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    pattern = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@,+-]*")
    word = _text("must be one word of letters, digits and . _ : / @ , + -.", pattern.fullmatch)
    add("--hosts", metavar="N", type=whole(1), help="number of equal hosts; 1 without it")
    add("--gpus-per-host", metavar="N", type=whole(1), help="processes per host, with one GPU each")
    about = "processes per host without GPUs; 1 if neither is given"
    add("--processes-per-host", metavar="N", type=whole(1), help=about)
    about = "torchrun, slurm, skypilot: a shell command to run first on each host"
    add("--setup", metavar="COMMAND", type=_command, help=about)
    duration = _text("must be [DAYS-]HH:MM:SS, as in 12:00:00.", seconds_of)
    add("--time", metavar="TIME", type=duration, help="slurm, kubernetes, vertex: end after [DAYS-]HH:MM:SS")
    about = "kubernetes, vertex, skypilot: the container image with trainkit"
    add("--image", metavar="IMAGE", type=word, help=about)
    about = "the storage of runs of all hosts: a claim (kubernetes), SERVER:/PATH of NFS (vertex), a volume (skypilot)"
    add("--shared", metavar="PLACE", type=word, help=about)
    about = "tf_config, spec, mpirun: the names of the hosts, separated by commas"
    add("--names", metavar="HOST,HOST", type=word, help=about)
    add("--head", metavar="HOST", type=word, help="torchrun: the host of the rendezvous")
    about = "torchrun: the port of the rendezvous, 29400; tf_config, spec: the first port of each host, 2222"
    add("--port", metavar="N", type=whole(1, 65_535), help=about)
    add("--restarts", metavar="N", type=whole(0), help="torchrun: number of restarts of all processes after one fails")
    about = "torchrun: number of hosts with which to continue after others are lost"
    add("--min-hosts", metavar="N", type=whole(1), help=about)
    add("--partition", metavar="NAME", type=word, help="slurm: the partition")
    add("--account", metavar="NAME", type=word, help="slurm: the account that is charged")
    add("--cpus-per-process", metavar="N", type=whole(1), help="slurm: cores of each process")
    add("--namespace", metavar="NAME", type=word, help="kubernetes: the namespace")
    add("--machine", metavar="TYPE", type=word, help="vertex: the machine type, n1-standard-8")
    add("--accelerator", metavar="TYPE", type=word, help="vertex, skypilot: the GPU, NVIDIA_L4 or A100")


def run(call: Call) -> int:
    """Print the script or manifest; raise here all errors that would arise on the engine's hosts."""
    name = " ".join(call.arguments)
    if name not in ENGINES:
        rule = f"no such engine. {nearest(name, ENGINES)}" if name else f"takes one of {', '.join(ENGINES)}."
        raise ConfigError([Problem(key="emit", value=name or MISSING, rule=rule, origin=COMMAND_LINE)])
    engine = ENGINES[name]
    if problems := list(_flag_problems(call, engine)):
        raise ConfigError(problems)
    composition = call.compose(reads_files=False)  # they are on the engine's hosts
    job = _job(call, composition, engine)
    _refuse_what_cannot_run(composition, engine, job)
    text = engine.write(job)
    named = {key_of(line): variable_of(line.partition("=")[2].strip("'\"")) for line in call.overrides}
    if names := ", ".join(f"{variable} ({key})" for key, variable in named.items() if variable):
        remark = f"# Secrets are not written here. Set these variables on the hosts of the run: {names}\n"
        first, newline, rest = text.partition("\n")
        text = f"{first}{newline}{remark}{rest}" if first.startswith("#!") else f"{remark}{text}"
    sys.stdout.write(text)
    return 0


def _flag_problems(call: Call, engine: ManifestWriter) -> Iterator[Problem]:
    """Yield problems of flags that the engine does not take, that it needs, and that contradict each other."""
    flags, name = call.flags, call.arguments[0]
    for flag in flags:
        if flag not in (*_COMMON, *engine.options):
            takers = [other for other, candidate in ENGINES.items() if flag in candidate.options]
            yield call.problem(flag, f"has no effect on {name}: only {', '.join(takers)} use it.")
    pattern, place = ("[^:]+:/.*", "SERVER:/PATH of NFS") if engine.shares_nfs else ("[^:]+", "the name of a volume")
    if "shared" in flags and not re.fullmatch(pattern, flags["shared"]):
        yield call.problem("shared", f"must be {place}.")
    if "gpus-per-host" in flags and "processes-per-host" in flags:
        yield call.problem("processes-per-host", "a host has processes with or without GPUs: give only one of the two.")
    if (total := _hosts(call) * _per_host(call)) > _MOST_RANKS:
        yield call.problem("hosts", f"makes {total:,} processes; the limit is {_MOST_RANKS:,}.")
    if "processes-per-host" in flags and engine.takes_devices:
        rule = f"has no effect on {name}: it starts one process per host. Give strategy.replicas."
        yield call.problem("processes-per-host", rule)
    needed = dict.fromkeys(engine.needs, f"{name} needs it")
    if "gpus-per-host" in flags:
        needed |= dict.fromkeys(engine.gpus_need, f"{name} needs it for GPUs")
    if _hosts(call) > 1:
        needed |= dict.fromkeys(engine.hosts_need, f"{name} needs it for several hosts")
    for flag, why in needed.items():
        if flag not in flags and not (flag == "shared" and _has_shared_folder(call)):
            also = " They write into one run folder; or give hydra.run.dir, a folder that all see."
            rule = f"is missing: {why}. --{flag} {parser_of('emit')[1][flag].metavar}."
            yield call.problem(flag, f"{rule}{also if flag == 'shared' else ''}")
    if "names" in flags and "names" in engine.options:
        yield from _name_problems(call)
    if "head" in engine.options:
        yield from _problems_of_torchrun(call)


def _hosts(call: Call) -> int:
    return int(call.flags.get("hosts", 1))


def _per_host(call: Call) -> int:
    return int(call.flags.get("gpus-per-host") or call.flags.get("processes-per-host", 1))


def _has_shared_folder(call: Call) -> bool:
    return "shared" in call.flags or "hydra.run.dir" in map(key_of, call.overrides)


def _name_problems(call: Call) -> Iterator[Problem]:
    """Yield problems of the host names."""
    names = call.flags["names"].split(",")
    double = next((name for name in names if names.count(name) > 1), None)
    if not all(names):
        yield call.problem("names", "contains an empty name.")
    elif double is not None:
        yield call.problem("names", f"names {double} twice. Give each host once.")
    elif call.flags.get("hosts", len(names)) != len(names):
        yield call.problem("hosts", f"but --names has {len(names)}. Leave it out.")
    else:
        port = call.flags.get("port", 2222)
        hosts = [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
        for problem in member_problems({"worker": hosts}, key="--names", origin=COMMAND_LINE):
            yield replace(problem, key="--names")


def _problems_of_torchrun(call: Call) -> Iterator[Problem]:
    """Yield problems of flags about the rendezvous of several hosts and about lost hosts."""
    flags, hosts = call.flags, _hosts(call)
    if hosts == 1:
        for flag in flags.keys() & {"head", "port", "min-hosts"}:
            yield call.problem(flag, "has no effect on one host. Give --hosts.")
        return
    if "min-hosts" in flags and not flags.get("restarts"):
        yield call.problem("min-hosts", "needs --restarts: the remaining hosts restart together.")
    if flags.get("min-hosts", 1) > hosts:
        yield call.problem("min-hosts", f"must be --hosts={hosts} or less.")


def _job(call: Call, composition: Composition, engine: ManifestWriter) -> ManifestJob:
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports torch
    from trainkit.strategies.base import PlanContext  # noqa: PLC0415

    flags, roles = call.flags, dict[str, int]()
    counts = Counter(task.role for task in build(composition.cfg.strategy, "strategy").tasks(PlanContext()))
    if engine.takes_roles and counts["ps"]:
        roles = {role: counts[role] for role in ROLES if counts[role]}
        if problems := list(_role_problems(call, engine, roles)):
            raise ConfigError(problems)
    hosts = len(flags["names"].split(",")) if "names" in flags else _hosts(call)
    return ManifestJob(
        name=composition.cfg.name,
        arguments=(*config_dir_arguments(call.config_dirs), *package_arguments(call.packages), *call.overrides),
        hosts=sum(roles.values()) if roles and engine.host_for_each else hosts,
        per_host=_per_host(call),
        gpus="gpus-per-host" in flags,
        options={name: str(value) for name, value in flags.items() if name not in _COMMON},
        roles=roles,
    )


def _role_problems(call: Call, engine: ManifestWriter, roles: Mapping[str, int]) -> Iterator[Problem]:
    """Yield problems of flags with a strategy whose tasks have roles."""
    flags, name, total = call.flags, call.arguments[0], sum(roles.values())
    shown = ", ".join(f"{number} {role}" for role, number in roles.items())
    if "processes-per-host" in flags:
        rule = f"has no effect with parameter servers: strategy.workers and strategy.servers set the tasks ({shown})."
        yield call.problem("processes-per-host", rule)
    if not engine.host_for_each:
        if _hosts(call) > total:
            yield call.problem("hosts", f"are more than the {total} tasks ({shown}).")
        return
    if "hosts" in flags:
        rule = f"has no effect on {name} with parameter servers: each task is a separate host ({shown})."
        yield call.problem("hosts", rule)
    if not _has_shared_folder(call):
        yield call.problem("shared", f"is missing: {name} needs it for several hosts. --shared PLACE.")
    if engine.kind == "TF_CONFIG" and "worker" not in roles:
        rule = "vertex needs a pool of workers between the chief and the servers. Give strategy.workers=2 or more."
        yield Problem(key="strategy.workers", value=1, rule=rule)


def _refuse_what_cannot_run(composition: Composition, engine: ManifestWriter, job: ManifestJob) -> None:
    """Refuse now, not in the queue, a job that the strategy and the batch reject."""
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports torch
    from trainkit.numerics.batch import resolve_batch  # noqa: PLC0415
    from trainkit.run.planning.build import numerics_of  # noqa: PLC0415
    from trainkit.strategies.base import PlanContext  # noqa: PLC0415

    cfg = composition.cfg
    strategy, numerics = build(cfg.strategy, "strategy"), numerics_of(cfg)
    precision = build(cfg.precision, "precision").value
    launch = job.launch(kind=engine.kind, takes_devices=engine.takes_devices)
    facts = PlanContext(
        numerics=numerics,
        num_gpus=job.per_host if job.gpus else 0,
        precision=precision,
        launch=launch,
    )
    problems = [*_own_launch(composition), *strategy.validate(facts)]
    if not problems:
        sizes = resolve_batch(
            global_size=cfg.batch.global_size,
            micro_size=cfg.batch.micro_size,
            accumulation=cfg.batch.accumulation,
            num_replicas=strategy.num_replicas(facts),
            lanes=numerics.lanes if numerics.reproducible else None,
            shards_a_replica=strategy.facts_in(facts).shards_per_replica,
        )
        problems = sizes if isinstance(sizes, list) else []
    if problems:
        raise composition.with_origins(ConfigError(problems))


def _own_launch(composition: Composition) -> Iterator[Problem]:
    """Yield problems of cluster keys: a config that names the participants would not join the engine's processes."""
    node = composition.values.get("cluster") or {}
    if composition.choices.get("cluster") != "local":
        key, value = "cluster", composition.choices.get("cluster")
    elif node.get("launcher", "auto") != "auto":
        key, value = "cluster.launcher", node["launcher"]
    else:
        return
    yield Problem(key=key, value=value, rule="the engine sets the tasks. Leave it out.")
