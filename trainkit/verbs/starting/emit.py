"""`trainkit emit ENGINE OVERRIDES`: print the script or manifest that starts the same run on an engine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainkit.cluster.manifests import ENGINES, ManifestJob, ManifestWriter
from trainkit.cluster.manifests.job import seconds_of
from trainkit.cluster.members import ROLES, member_problems
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.targets.allowed import package_arguments
from trainkit.config.values import closest
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
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@,+-]*")


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    add("--hosts", metavar="N", type=whole(1), help="number of equal hosts; 1 without it")
    add("--gpus-per-host", metavar="N", type=whole(1), help="processes per host, with one GPU each")
    about = "processes per host without GPUs; 1 if neither is given"
    add("--processes-per-host", metavar="N", type=whole(1), help=about)
    add("--setup", metavar="COMMAND", help="torchrun, slurm, skypilot: a shell command to run first on each host")
    add("--time", metavar="TIME", help="slurm, kubernetes, vertex: end after [DAYS-]HH:MM:SS")
    add("--image", metavar="IMAGE", help="kubernetes, vertex, skypilot: the container image with trainkit")
    about = (
        "the storage of runs, for all hosts: a claim (kubernetes), SERVER:/PATH of NFS (vertex), a volume (skypilot)"
    )
    add("--shared", metavar="PLACE", help=about)
    add("--names", metavar="HOST,HOST", help="tf_config, spec, mpirun: the names of the hosts, separated by commas")
    add("--head", metavar="HOST", help="torchrun: the host of the rendezvous")
    about = "torchrun: the port of the rendezvous, 29400; tf_config, spec: the first port of each host, 2222"
    add("--port", metavar="N", type=whole(1, 65535), help=about)
    add("--restarts", metavar="N", type=whole(0), help="torchrun: number of restarts of all processes after one fails")
    about = "torchrun: number of hosts with which to continue after others are lost"
    add("--min-hosts", metavar="N", type=whole(1), help=about)
    add("--partition", metavar="NAME", help="slurm: the partition")
    add("--account", metavar="NAME", help="slurm: the account that is charged")
    add("--cpus-per-process", metavar="N", type=whole(1), help="slurm: cores of each process")
    add("--namespace", metavar="NAME", help="kubernetes: the namespace")
    add("--machine", metavar="TYPE", help="vertex: the machine type, n1-standard-8")
    add("--accelerator", metavar="TYPE", help="vertex, skypilot: the GPU, NVIDIA_L4 or A100")


def run(call: Call) -> int:
    """Print the script or manifest; raise here all errors that would arise on the engine's hosts."""
    engine = _engine(call)
    problems = list(_flag_problems(call, engine))
    if problems:
        raise ConfigError(problems)
    composition = call.compose(reads_files=False)  # they are on the engine's hosts
    job = _job(call, composition, engine)
    _refuse_what_cannot_run(composition, engine, job)
    sys.stdout.write(_with_remark(engine.write(job), call.overrides))
    return 0


def _with_remark(text: str, overrides: Sequence[str]) -> str:
    """Return the script or manifest, with a comment that names the environment variables for its secrets."""
    named = {key_of(line): variable_of(line.partition("=")[2].strip("'\"")) for line in overrides}
    names = ", ".join(f"{variable} ({key})" for key, variable in named.items() if variable)
    if not names:
        return text
    remark = f"# Secrets are not written here. Set these variables on the hosts of the run: {names}\n"
    first, newline, rest = text.partition("\n")
    return f"{first}{newline}{remark}{rest}" if first.startswith("#!") else f"{remark}{text}"


def _engine(call: Call) -> ManifestWriter:
    name = call.arguments[0] if len(call.arguments) == 1 else ""
    if name in ENGINES:
        return ENGINES[name]
    near = closest(name, ENGINES) if name else None
    hint = f"Did you mean {near}? " if near else ""
    rule = f"no such engine. {hint}There are: {', '.join(ENGINES)}." if name else f"takes one of {', '.join(ENGINES)}."
    key = "emit" if name or not call.arguments else f"emit {' '.join(call.arguments)}"
    raise ConfigError([Problem(key=key, value=name or MISSING, rule=rule, origin="command line")])


def _flag_problems(call: Call, engine: ManifestWriter) -> Iterator[Problem]:
    flags, name = call.flags, call.arguments[0]
    for flag, text in flags.items():
        rule = _misfit(flag, text, engine) if isinstance(text, str) else None
        if flag not in (*_COMMON, *engine.options):
            takers = [other for other, candidate in ENGINES.items() if flag in candidate.options]
            rule = f"has no effect on {name}: only {', '.join(takers)} use it."
        if rule is not None:
            yield call.problem(flag, rule)
    if "gpus-per-host" in flags and "processes-per-host" in flags:
        yield call.problem("processes-per-host", "a host has processes with or without GPUs: give only one of the two.")
    if (total := _number(call, "hosts") * _per_host(call)) > _MOST_RANKS:
        yield call.problem("hosts", f"makes {total:,} processes; the limit is {_MOST_RANKS:,}.")
    if "processes-per-host" in flags and engine.takes_devices:
        yield call.problem(
            "processes-per-host", f"has no effect on {name}: it starts one process per host. Give strategy.replicas."
        )
    yield from _missing(call, engine)
    if "names" in flags and "names" in engine.options:
        yield from _name_problems(call)
    if "head" in engine.options:
        yield from _host_flag_problems(call)


def _missing(call: Call, engine: ManifestWriter) -> Iterator[Problem]:
    """Yield problems of flags that the engine needs here."""
    flags, name = call.flags, call.arguments[0]
    several, known = flags.get("hosts", 1) > 1, parser_of("emit")[1]
    needed = dict.fromkeys(engine.needs, f"{name} needs it")
    if "gpus-per-host" in flags:
        needed |= dict.fromkeys(engine.gpus_need, f"{name} needs it for GPUs")
    if several:
        needed |= dict.fromkeys(engine.hosts_need, f"{name} needs it for several hosts")
    for flag, why in needed.items():
        if flag in flags:
            continue
        if flag == "shared" and "hydra.run.dir" in map(key_of, call.overrides):
            continue
        also = (
            " They write into one run folder; or give hydra.run.dir, a folder that all see." if flag == "shared" else ""
        )
        yield call.problem(flag, f"is missing: {why}. --{flag} {known[flag].metavar}.{also}")


def _name_problems(call: Call) -> Iterator[Problem]:
    """Yield problems of the host names."""
    flags = call.flags
    names = flags["names"].split(",")
    double = next((name for name in names if names.count(name) > 1), None)
    if not all(names):
        yield call.problem("names", "contains an empty name.")
    elif double is not None:
        yield call.problem("names", f"names {double} twice. Give each host once.")
    elif flags.get("hosts", len(names)) != len(names):
        yield call.problem("hosts", f"but --names has {len(names)}. Leave it out.")
    else:
        port = flags.get("port", 2222)
        hosts = [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
        for problem in member_problems({"worker": hosts}, key="--names", origin=COMMAND_LINE):
            yield replace(problem, key="--names")


def _host_flag_problems(call: Call) -> Iterator[Problem]:
    """Yield problems of torchrun's flags about the rendezvous of several hosts and about lost hosts."""
    flags = call.flags
    hosts = _number(call, "hosts")
    if hosts == 1:
        for flag in ("head", "port", "min-hosts"):
            if flag in flags:
                yield call.problem(flag, "has no effect on one host. Give --hosts.")
        return
    if "min-hosts" in flags and not flags.get("restarts"):
        yield call.problem("min-hosts", "needs --restarts: the remaining hosts restart together.")
    if _number(call, "min-hosts") > hosts:
        yield call.problem("min-hosts", f"must be --hosts={hosts} or less.")


def _misfit(flag: str, text: str, engine: ManifestWriter) -> str | None:
    """Return a rule that the value breaks, without regard to other flags; None if it is valid."""
    if flag == "time":
        return None if seconds_of(text) else "must be [DAYS-]HH:MM:SS, as in 12:00:00."
    if flag == "setup" and mask(text) != text:
        return "contains a password in a URL. Read it from a file or a variable on the host instead."
    if flag == "setup":
        return None if text.isprintable() else "must be one line. Put longer text into a script of your own."
    if flag == "shared":
        server, colon, path = text.partition(":")
        if engine.shares_nfs:
            return None if server and path.startswith("/") and _WORD.fullmatch(text) else "must be SERVER:/PATH of NFS."
        return None if not colon and _WORD.fullmatch(text) else "must be the name of a volume."
    return None if _WORD.fullmatch(text) else "must be one word of letters, digits and . _ : / @ , + -."


def _number(call: Call, flag: str) -> int:
    return int(call.flags.get(flag, 1))


def _per_host(call: Call) -> int:
    return int(call.flags.get("gpus-per-host") or call.flags.get("processes-per-host", 1))


def _job(call: Call, composition: Composition, engine: ManifestWriter) -> ManifestJob:
    flags = call.flags
    gpus = "gpus-per-host" in flags
    roles = _roles(composition) if engine.takes_roles else {}
    problems = list(_role_problems(call, engine, roles)) if roles else []
    if problems:
        raise ConfigError(problems)
    named = len(flags["names"].split(",")) if "names" in flags else _number(call, "hosts")
    hosts = sum(roles.values()) if roles and engine.host_for_each else named
    return ManifestJob(
        name=composition.cfg.name,
        arguments=tuple(_arguments(call)),
        hosts=hosts,
        per_host=_per_host(call),
        gpus=gpus,
        options={name: str(text) for name, text in flags.items() if name not in _COMMON},
        roles=roles,
    )


def _roles(composition: Composition) -> dict[str, int]:
    """Return role -> number of its tasks, if the strategy has other roles than worker; else an empty dict."""
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports torch
    from trainkit.strategies.base import PlanContext  # noqa: PLC0415

    counts = Counter(task.role for task in build(composition.cfg.strategy, "strategy").tasks(PlanContext()))
    return {role: counts[role] for role in ROLES if counts[role]} if counts["ps"] else {}


def _role_problems(call: Call, engine: ManifestWriter, roles: Mapping[str, int]) -> Iterator[Problem]:
    """Yield problems of flags with a strategy whose tasks have roles."""
    flags, name, total = call.flags, call.arguments[0], sum(roles.values())
    shown = ", ".join(f"{number} {role}" for role, number in roles.items())
    if "hosts" in flags and engine.host_for_each:
        yield call.problem(
            "hosts", f"has no effect on {name} with parameter servers: each task is a separate host ({shown})."
        )
    if "processes-per-host" in flags:
        yield call.problem(
            "processes-per-host",
            f"has no effect with parameter servers: strategy.workers and strategy.servers set the tasks ({shown}).",
        )
    if engine.host_for_each and "shared" not in flags and "hydra.run.dir" not in map(key_of, call.overrides):
        yield call.problem("shared", f"is missing: {name} needs it for several hosts. --shared PLACE.")
    if engine.kind == "TF_CONFIG" and engine.host_for_each and "worker" not in roles:
        rule = "vertex needs a pool of workers between the chief and the servers. Give strategy.workers=2 or more."
        yield Problem(key="strategy.workers", value=1, rule=rule)
    if not engine.host_for_each and _number(call, "hosts") > total:
        yield call.problem("hosts", f"are more than the {total} tasks ({shown}).")


def _arguments(call: Call) -> Iterator[str]:
    """Yield trainkit's arguments without the verb; the user's own folders relative to the current one."""
    yield from config_dir_arguments(call.config_dirs)
    yield from package_arguments(call.packages)
    yield from call.overrides


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
