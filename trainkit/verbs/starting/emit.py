"""`trainkit emit ENGINE OVERRIDES`: print the script or manifest that starts the same run on an engine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from trainkit.cluster.address import Address
from trainkit.cluster.manifests import ENGINES, Engine, ManifestJob
from trainkit.cluster.members import ROLES, member_problems
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.targets.allowed import package_arguments
from trainkit.config.targets.build import build
from trainkit.config.values import nearest
from trainkit.config.yaml_files import config_dir_arguments
from trainkit.errors import MISSING, ConfigError, Problem, refuse
from trainkit.redaction import variable_of
from trainkit.run.planning.build import numerics_of
from trainkit.run.planning.plan import batch_sizes
from trainkit.strategies.base import PlanContext, Strategy
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.table import VERBS

_MOST_RANKS: Final = 100_000
"""Largest number of processes of one launch, over all hosts."""
_COMMON: Final = ("hosts", "gpus-per-host", "processes-per-host")


def run(call: Call) -> int:
    """Print the script or manifest; raise here all errors that would arise on the engine's hosts."""
    refuse(problems(call))
    engine = ENGINES[call.arguments[0]]
    composition = call.compose(reads_files=False)  # they are on the engine's hosts
    strategy: Strategy = build(composition.cfg.strategy, "strategy")
    job = _job(call, composition, engine, strategy)
    _refuse_what_cannot_run(composition, engine, job, strategy)
    text = engine.write(job)
    variables = {key_of(line): variable_of(line.partition("=")[2].strip("'\"")) for line in call.overrides}
    if names := ", ".join(f"{variable} ({key})" for key, variable in variables.items() if variable):
        remark = f"# Secrets are not written here. Set these variables on the hosts of the run: {names}\n"
        first, newline, rest = text.partition("\n")
        text = f"{first}{newline}{remark}{rest}" if first.startswith("#!") else f"{remark}{text}"
    sys.stdout.write(text)
    return 0


def problems(call: Call) -> Iterator[Problem]:
    """Yield problems of flags that the engine does not take, that it needs, and that contradict each other."""
    flags, name = call.flags, " ".join(call.arguments)
    if name not in ENGINES:
        rule = f"no such engine. {nearest(name, ENGINES)}" if name else f"takes one of {', '.join(ENGINES)}."
        yield Problem(key="emit", value=name or MISSING, rule=rule, origin=COMMAND_LINE)
        return
    engine, options, (hosts, per_host) = ENGINES[name], ENGINES[name].options.split(), _size(call)
    for flag in flags:
        if flag not in (*_COMMON, *options):
            takers = [other for other, candidate in ENGINES.items() if flag in candidate.options.split()]
            yield call.problem(flag, f"has no effect on {name}: only {', '.join(takers)} use it.")
    pattern, form = ("[^:]+:/.*", "SERVER:/PATH of NFS") if name == "vertex" else ("[^:]+", "the name of a volume")
    if "shared" in flags and not re.fullmatch(pattern, flags["shared"]):
        yield call.problem("shared", f"must be {form}.")
    if "gpus-per-host" in flags and "processes-per-host" in flags:
        yield call.problem("processes-per-host", "a host has processes with or without GPUs: give only one of the two.")
    if (total := hosts * per_host) > _MOST_RANKS:
        yield call.problem("hosts", f"makes {total:,} processes; the limit is {_MOST_RANKS:,}.")
    if "processes-per-host" in flags and engine.takes_devices:
        rule = f"has no effect on {name}: it starts one process per host. Give strategy.replicas."
        yield call.problem("processes-per-host", rule)
    needed = dict.fromkeys(engine.needs, "")
    needed |= dict.fromkeys(engine.gpus_need, " for GPUs") if "gpus-per-host" in flags else {}
    needed |= dict.fromkeys(engine.hosts_need, " for several hosts") if hosts > 1 else {}
    for flag, why in needed.items():
        if flag not in flags and not (flag == "shared" and _has_shared_folder(call)):
            shown = next(item.name for item in VERBS["emit"].flags if item.name.startswith(f"--{flag} "))
            also = " They write into one run folder; or give hydra.run.dir, a folder that all see."
            rule = f"is missing: {name} needs it{why}. {shown}.{also if flag == 'shared' else ''}"
            yield call.problem(flag, rule)
    if "names" in flags and "names" in options:
        yield from _name_problems(call)
    if "head" in options:
        yield from _problems_of_torchrun(call, hosts)


def _problems_of_torchrun(call: Call, hosts: int) -> Iterator[Problem]:
    """Yield problems of flags about the rendezvous of several hosts and about lost hosts."""
    flags = call.flags
    for flag in flags.keys() & {"head", "port", "min-hosts"} if hosts == 1 else ():
        yield call.problem(flag, "has no effect on one host. Give --hosts.")
    if hosts > 1 and "min-hosts" in flags and not flags.get("restarts"):
        yield call.problem("min-hosts", "needs --restarts: the remaining hosts restart together.")
    if hosts > 1 and flags.get("min-hosts", 1) > hosts:
        yield call.problem("min-hosts", f"must be --hosts={hosts} or less.")


def _size(call: Call) -> tuple[int, int]:
    """Return the number of hosts, and of processes on each."""
    flags = call.flags
    return flags.get("hosts", 1), flags.get("gpus-per-host") or flags.get("processes-per-host", 1)


def _has_shared_folder(call: Call) -> bool:
    return "shared" in call.flags or "hydra.run.dir" in map(key_of, call.overrides)


def _name_problems(call: Call) -> Iterator[Problem]:
    """Yield problems of the host names."""
    names, port = call.flags["names"].split(","), call.flags.get("port", 2222)
    double = next((name for name in names if names.count(name) > 1), None)
    if not all(names):
        yield call.problem("names", "contains an empty name.")
    elif double is not None:
        yield call.problem("names", f"names {double} twice. Give each host once.")
    elif call.flags.get("hosts", len(names)) != len(names):
        yield call.problem("hosts", f"but --names has {len(names)}. Leave it out.")
    else:
        addresses = [str(Address(name, port)) for name in names]
        for problem in member_problems({"worker": addresses}, key="--names", origin=COMMAND_LINE):
            yield replace(problem, key="--names")


def _job(call: Call, composition: Composition, engine: Engine, strategy: Strategy) -> ManifestJob:
    """Return the job, whose tasks have roles under a strategy with parameter servers.

    Raises:
        ConfigError: flags that contradict the roles.
    """
    flags, name, roles, (hosts, per_host) = call.flags, call.arguments[0], dict[str, int](), _size(call)
    counts = Counter(task.role for task in strategy.tasks(PlanContext()))
    if engine.takes_roles and counts["ps"]:
        roles = {role: counts[role] for role in ROLES if counts[role]}
        shown, wrong = ", ".join(f"{number} {role}" for role, number in roles.items()), list[Problem]()
        if "processes-per-host" in flags:
            rule = "has no effect with parameter servers: strategy.workers and strategy.servers set the tasks"
            wrong.append(call.problem("processes-per-host", f"{rule} ({shown})."))
        if not engine.host_for_each:
            if hosts > sum(roles.values()):
                wrong.append(call.problem("hosts", f"are more than the {sum(roles.values())} tasks ({shown})."))
        else:
            if "hosts" in flags:
                rule = f"has no effect on {name} with parameter servers: each task is a separate host ({shown})."
                wrong.append(call.problem("hosts", rule))
            if not _has_shared_folder(call):
                rule = f"is missing: {name} needs it for several hosts. --shared PLACE."
                wrong.append(call.problem("shared", rule))
            if engine.kind == "TF_CONFIG" and "worker" not in roles:
                rule = "vertex needs a pool of workers between the chief and the servers. Give strategy.workers=2"
                wrong.append(Problem(key="strategy.workers", value=1, rule=f"{rule} or more."))
            hosts = sum(roles.values())
        refuse(wrong)
    return ManifestJob(
        name=composition.cfg.name,
        arguments=(*config_dir_arguments(call.config_dirs), *package_arguments(call.packages), *call.overrides),
        hosts=len(flags["names"].split(",")) if "names" in flags else hosts,
        per_host=per_host,
        gpus="gpus-per-host" in flags,
        options={name: str(value) for name, value in flags.items() if name not in _COMMON},
        roles=roles,
    )


def _refuse_what_cannot_run(composition: Composition, engine: Engine, job: ManifestJob, strategy: Strategy) -> None:
    """Refuse now, not in the queue, a job that the strategy and the batch reject, or whose config names its tasks."""
    cfg, numerics, node = composition.cfg, numerics_of(composition.cfg), composition.values.get("cluster") or {}
    facts = PlanContext(
        numerics=numerics,
        num_gpus=job.per_host if job.gpus else 0,
        precision=build(cfg.precision, "precision").value,
        launch=job.launch(kind=engine.kind, takes_devices=engine.takes_devices),
    )
    settings = {"cluster": composition.choices.get("cluster"), "cluster.launcher": node.get("launcher", "auto")}
    key = "cluster" if settings["cluster"] != "local" else "cluster.launcher"
    rule = "the engine sets the tasks. Leave it out."
    wrong = [] if settings[key] == "auto" else [Problem(key=key, value=settings[key], rule=rule)]
    wrong += strategy.validate(facts)
    if not wrong:
        sizes = batch_sizes(cfg, strategy, facts)
        wrong = sizes if isinstance(sizes, list) else []
    if wrong:
        raise composition.with_origins(ConfigError(wrong))
