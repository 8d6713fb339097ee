"""`trainkit emit ENGINE OVERRIDES`: print the script or manifest that starts the same run on an engine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from trainkit.cluster.manifests import ENGINES, Engine, ManifestJob
from trainkit.cluster.members import ROLES, member_problems
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.targets.allowed import package_arguments
from trainkit.config.targets.build import build
from trainkit.config.values import nearest
from trainkit.config.yaml_files import config_dir_arguments
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.numerics.batch import resolve_batch
from trainkit.redaction import variable_of
from trainkit.run.planning.build import numerics_of
from trainkit.strategies.base import PlanContext
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.table import VERBS

_MOST_RANKS: Final = 100_000
"""Largest number of processes of one launch, over all hosts."""
_COMMON: Final = ("hosts", "gpus-per-host", "processes-per-host")


def run(call: Call) -> int:
    """Print the script or manifest; raise here all errors that would arise on the engine's hosts."""
    if wrong := list(problems(call)):
        raise ConfigError(wrong)
    engine = ENGINES[call.arguments[0]]
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


def problems(call: Call) -> Iterator[Problem]:
    """Yield problems of flags that the engine does not take, that it needs, and that contradict each other."""
    flags, name = call.flags, " ".join(call.arguments)
    if name not in ENGINES:
        rule = f"no such engine. {nearest(name, ENGINES)}" if name else f"takes one of {', '.join(ENGINES)}."
        yield Problem(key="emit", value=name or MISSING, rule=rule, origin=COMMAND_LINE)
        return
    engine, options = ENGINES[name], ENGINES[name].options.split()
    for flag in flags:
        if flag not in (*_COMMON, *options):
            takers = [other for other, candidate in ENGINES.items() if flag in candidate.options.split()]
            yield call.problem(flag, f"has no effect on {name}: only {', '.join(takers)} use it.")
    pattern, place = ("[^:]+:/.*", "SERVER:/PATH of NFS") if name == "vertex" else ("[^:]+", "the name of a volume")
    if "shared" in flags and not re.fullmatch(pattern, flags["shared"]):
        yield call.problem("shared", f"must be {place}.")
    if "gpus-per-host" in flags and "processes-per-host" in flags:
        yield call.problem("processes-per-host", "a host has processes with or without GPUs: give only one of the two.")
    if (total := _hosts(call) * _per_host(call)) > _MOST_RANKS:
        yield call.problem("hosts", f"makes {total:,} processes; the limit is {_MOST_RANKS:,}.")
    if "processes-per-host" in flags and engine.takes_devices:
        rule = f"has no effect on {name}: it starts one process per host. Give strategy.replicas."
        yield call.problem("processes-per-host", rule)
    yield from _absent(call, engine, name)
    if "names" in flags and "names" in options:
        yield from _name_problems(call)
    if "head" in options:
        yield from _problems_of_torchrun(call)


def _absent(call: Call, engine: Engine, name: str) -> Iterator[Problem]:
    """Yield problems of absent flags."""
    flags = call.flags
    needed = dict.fromkeys(engine.needs, f"{name} needs it")
    if "gpus-per-host" in flags:
        needed |= dict.fromkeys(engine.gpus_need, f"{name} needs it for GPUs")
    if _hosts(call) > 1:
        needed |= dict.fromkeys(engine.hosts_need, f"{name} needs it for several hosts")
    shown = {one.name.partition(" ")[0]: one.name for one in VERBS["emit"].flags}
    for flag, why in needed.items():
        if flag not in flags and not (flag == "shared" and _has_shared_folder(call)):
            also = " They write into one run folder; or give hydra.run.dir, a folder that all see."
            rule = f"is missing: {why}. {shown[f'--{flag}']}.{also if flag == 'shared' else ''}"
            yield call.problem(flag, rule)


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


def _job(call: Call, composition: Composition, engine: Engine) -> ManifestJob:
    flags, roles = call.flags, dict[str, int]()
    counts = Counter(task.role for task in build(composition.cfg.strategy, "strategy").tasks(PlanContext()))
    if engine.takes_roles and counts["ps"]:
        roles = {role: counts[role] for role in ROLES if counts[role]}
        if wrong := list(_role_problems(call, engine, roles)):
            raise ConfigError(wrong)
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


def _role_problems(call: Call, engine: Engine, roles: Mapping[str, int]) -> Iterator[Problem]:
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


def _refuse_what_cannot_run(composition: Composition, engine: Engine, job: ManifestJob) -> None:
    """Refuse now, not in the queue, a job that the strategy and the batch reject."""
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
    wrong = [*_own_launch(composition), *strategy.validate(facts)]
    if not wrong:
        sizes = resolve_batch(
            global_size=cfg.batch.global_size,
            micro_size=cfg.batch.micro_size,
            accumulation=cfg.batch.accumulation,
            num_replicas=strategy.num_replicas(facts),
            lanes=numerics.lanes if numerics.reproducible else None,
            shards_a_replica=strategy.facts_in(facts).shards_per_replica,
        )
        wrong = sizes if isinstance(sizes, list) else []
    if wrong:
        raise composition.with_origins(ConfigError(wrong))


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
