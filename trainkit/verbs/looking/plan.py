"""`trainkit plan OVERRIDES`: print the whole run on one screen, without starting a process or using a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.local import launch_environment_of
from trainkit.config.composition import Composition
from trainkit.config.grammar import refusal
from trainkit.config.identity import fingerprint
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import ConfigError, Problem, together
from trainkit.files import num_bytes, reporting
from trainkit.numerics.schedules import LearningRate
from trainkit.report.json_output import print_json
from trainkit.report.rate_curve import corners, curve_line
from trainkit.report.schemas.planning import PlannedRemedy
from trainkit.report.tables import print_rows, print_summary
from trainkit.run.estimates.hardware import hardware_of
from trainkit.run.estimates.memory import Verdict, verdict_of
from trainkit.run.estimates.outlook import Outlook, outlook_of
from trainkit.run.estimates.remedies import remedies_for
from trainkit.run.planning.memory import refuse_small_host
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import coupling_of, cut_notes, model_notes
from trainkit.run.planning.plan import RunPlan, ideal_bubble_of, imagined_launch, make_plan, where_rows
from trainkit.strategies.base import StagePart
from trainkit.trained.build import meta_model
from trainkit.verbs.support.call import Call, declared_for
from trainkit.verbs.support.measured import line_printer


class _Planned(NamedTuple):
    """A plan, with the results computed from it."""

    plan: RunPlan
    knows_length: bool
    """Whether the length of the training data is known."""
    outlook: Outlook
    parts: Sequence[StagePart]
    """The parts of a replica that spans several devices."""
    verdict: Verdict | None
    """Whether the run fits; None without `hardware`."""
    remedies: Sequence[PlannedRemedy]
    """Changes that make it fit, if it does not."""
    notes: Sequence[str]

    @property
    def num_steps(self) -> int | None:
        """Steps of the training; None if they depend on an unknown length of the data, or time of a step."""
        cfg, time, seconds = self.plan.cfg, self.outlook.time, self.plan.stop_after_s
        bounded = seconds is None or cfg.epochs is not None or cfg.steps is not None
        num_steps = self.plan.num_steps if bounded and (self.knows_length or cfg.steps is not None) else None
        if seconds is None or time is None:
            return num_steps
        return max(1, min(round(seconds / time.step_s), num_steps or self.plan.num_steps))

    @property
    def rates(self) -> dict[str, LearningRate]:
        """The learning rate of each optimizer; with `stop_after`, over the planned number of steps."""
        rates = {optimizer.name: optimizer.rate for optimizer in self.plan.optimizers} or {"": self.plan.rate}
        return {name: replace(rate, num_steps=self.num_steps or rate.num_steps) for name, rate in rates.items()}


def _hosts(call: Call) -> tuple[int | None, LaunchEnvironment | None]:
    """Return the GPUs of a host, or None for those of this host, and the hypothetical launch of `--hosts`.

    Raises:
        ConfigError: flags that exclude or need each other.
    """
    world, hosts, per_host = (call.flags.get(name) for name in ("world", "hosts", "gpus-per-host"))
    if hosts is None and per_host is None:
        return world, None
    if hosts is None or per_host is None:
        flag, other = ("--hosts", "--gpus-per-host") if per_host is None else ("--gpus-per-host", "--hosts")
        raise refusal(flag, f"needs {other}, too.")
    if world is not None:
        raise refusal("--world", "plans for one host. Leave it out with --hosts.")
    if hosts * per_host > MOST_PROCESSES:
        raise refusal("--hosts", f"makes {hosts * per_host:,} tasks. Give {MOST_PROCESSES:,} or fewer.")

    return per_host, imagined_launch(hosts, per_host)


def run(call: Call) -> int:
    """Print the plan; return 2 if there are problems, like every verb."""
    num_gpus, imagined = _hosts(call)
    composition = call.compose(may_lack=None if "open-data" in call.flags else "data")
    if "fail-if-too-big" in call.flags and not composition.cfg.hardware:
        raise refusal(
            "--fail-if-too-big", "needs the memory of a device. Name the hardware: hardware=this, hardware=h100_sxm."
        )
    planned = _planned(call, composition, num_gpus, imagined)
    if "rate-png" in call.flags:
        _draw(planned, call.flags["rate-png"])
    if "json" in call.flags:
        print_json(_document(planned))
    else:
        _show(planned)
    too_big = planned.verdict is not None and planned.verdict.fits is False
    return 2 if too_big and "fail-if-too-big" in call.flags else 0


def _draw(planned: _Planned, name: str) -> None:
    """Draw the learning rate of every step."""
    rule = None if name.endswith(".png") else "must end in .png."
    if planned.num_steps is None:
        rule = "needs the number of steps, and the length of the data is unknown: give --num-samples N."
        if planned.plan.cfg.stop_after is not None:
            rule = "needs the time of a step, to know the steps of stop_after. Give hardware=this."
    if rule:
        raise ConfigError([Problem(key="--rate-png", value=name, rule=rule, origin="command line")])
    from trainkit.numerics.schedules import lr_points  # noqa: PLC0415 - not for --help
    from trainkit.report.plots import draw_rates  # noqa: PLC0415 - imports matplotlib

    rates = {label: lr_points(rate, rate.num_steps) for label, rate in planned.rates.items()}
    path = Path(name).expanduser()
    with reporting(path):
        draw_rates(path, title=planned.plan.cfg.name, rates=rates)


def _planned(
    call: Call, composition: Composition, num_gpus: int | None, imagined: LaunchEnvironment | None
) -> _Planned:
    try:
        data = declared_for(call, composition.cfg)
        launch = imagined or launch_environment_of(composition.cfg)
        splits = None if data is None else data.splits
        plan = make_plan(composition.cfg, num_gpus=num_gpus, launch=launch, splits=splits)
        model = meta_model(plan.cfg)
        notes = together(
            lambda: refuse_misfits(plan, model), then=lambda: model_notes(plan, model, composition.is_given)
        )
        notes = [*(() if data is None else data.notes), *notes]
        if plan.components.sample is not None:
            notes += cut_notes(plan, lambda: coupling_of(plan, model))
        plan = plan.resolved(lambda: model)  # resolve `auto` once for all lines of the output
        ends = data is None or data.knows_length or composition.cfg.steps is not None
        hardware = hardware_of(composition.cfg, line_printer("plan"))
        outlook = outlook_of(plan, model, ends=ends)
        parts = plan.components.strategy.describe_partition(model, plan.context)
        verdict, remedies = None, list[PlannedRemedy]()
        if hardware is not None:
            if hardware.whole_host:
                refuse_small_host(plan, model, hardware.memory_bytes)
            verdict = verdict_of(plan, outlook.memory, hardware)
            remedies = remedies_for(plan, model, hardware) if verdict.fits is False else []
    except ConfigError as error:
        raise composition.with_origins(error) from error
    notes = [*composition.notes, *notes, *outlook.memory.notes(), *outlook.notes()]
    return _Planned(plan, data is None or data.knows_length, outlook, parts, verdict, remedies, notes)


def _show(planned: _Planned) -> None:
    plan, memory = planned.plan, planned.outlook.memory
    rows = plan.summary(memory.static.num_params) | dict([*where_rows(plan), *_step_rows(planned), *memory.rows()])
    if not planned.knows_length:  # without the rows that depend on the length of the data
        curves = {f"rate {name}".strip() for name in planned.rates} | {"rate curve"}
        unknown = {"samples", "last batch", *(() if plan.cfg.warmup.epochs is None else ("warmup", *curves))}
        rows |= {} if planned.num_steps is None else {"steps": f"{planned.num_steps:,}"}
        unknown |= {"steps", *curves} if planned.num_steps is None else set()
        rows = {label: text for label, text in rows.items() if label not in unknown}
    rows |= dict([*(planned.verdict.rows() if planned.verdict else ()), *planned.outlook.rows()])
    print_summary(f"plan of {plan.cfg.name}", rows, notes=planned.notes)
    if planned.parts:
        rows_of_parts = [
            (str(part.stage), part.modules, f"{part.num_params:,}", num_bytes(part.num_bytes), part.device)
            for part in planned.parts
        ]
        print_rows(("stage", "modules", "parameters", "bytes", "device"), rows_of_parts)
    if planned.remedies:
        head = "to make it fit" if planned.remedies[0].fits else "no change suffices; the closest"
        rows_of_remedies = [(item.overrides, num_bytes(item.needs), item.price) for item in planned.remedies]
        print_rows((head, "needs", "price"), rows_of_remedies)


def _document(planned: _Planned) -> dict[str, object]:
    """Return the output of `--json`; unknown values are null."""
    plan, memory = planned.plan, planned.outlook.memory
    return {
        "version": 1,
        "name": plan.cfg.name,
        "num_params": memory.static.num_params,
        "tasks": [{"task": str(task), "rank": task.rank, "device": task.device} for task in plan.tasks],
        "replicas": plan.num_replicas,
        "fingerprint": fingerprint(plan.cfg),
        "bubble": ideal_bubble_of(plan),
        "batch": {"global_size": plan.batch.global_size, "micro_size": plan.batch.micro_size},
        "steps": planned.num_steps,
        "stages": [
            {"stage": part.stage, "modules": part.modules, "num_params": part.num_params, "device": part.device}
            for part in planned.parts
        ],
        "memory": memory.document(),
        "fits": None if planned.verdict is None else planned.verdict.fits,
        "remedies": [asdict(remedy) for remedy in planned.remedies],
        **planned.outlook.document(),
        "notes": list(planned.notes),
    }


def _step_rows(planned: _Planned) -> Iterator[tuple[str, str]]:
    plan = planned.plan
    last = plan.batch.batch_size(plan.batch.steps_per_epoch - 1)
    if last < plan.batch.global_size:
        shards = plan.batch.num_shards(plan.batch.steps_per_epoch - 1)
        yield "last batch", f"{last} samples in {shards} shard{'' if shards == 1 else 's'}"
    if (steps := planned.num_steps) is None and plan.cfg.stop_after is not None:
        yield "rate curve", "follows the share of the time that is used"
        return
    if plan.cfg.stop_after is not None and steps is not None and steps < plan.num_steps:
        yield "steps", f"about {steps:,} in {plan.cfg.stop_after} of training ({plan.batch.steps_per_epoch:,} an epoch)"
    rates = planned.rates
    yield "rate curve", "; ".join(f"{name} {corners(rate)}".strip() for name, rate in rates.items())
    for name, rate in rates.items():
        yield f"rate {name}".strip(), curve_line(rate, encoding=sys.stdout.encoding)
