"""The evaluations that a decision about the training counts."""

from __future__ import annotations

from trainkit.config.schema import MonitoredMetric
from trainkit.errors import ConfigError, Problem
from trainkit.trainer.events import Row, Run
from trainkit.trainer.loop import every_steps_or_epochs


def counted_value(run: Run, metrics: Row, *, since: int, callback: str) -> float | None:
    """Return the value of `eval.metric` if an evaluation counts; None for another split, or for one that is not due.

    An evaluation counts if `eval.every_steps` or `eval.every_epochs` asks for it: not the one at the end of a run that
    is stopped early, which an uninterrupted run does not have.

    Args:
        run: the run.
        metrics: the metrics of the evaluation.
        since: the step of the last evaluation that counted.
        callback: name of the callback that compares the metric, for the error.

    Raises:
        ConfigError: the evaluation of this split has no such metric.
    """
    name = MonitoredMetric.of(run.cfg.eval).metric
    figures = [figure for figure in metrics if figure.startswith(f"{name.partition('/')[0]}/")]
    if not figures:
        return None
    if name not in metrics:
        rule = f"{callback} compares this metric, and the evaluation returns {', '.join(figures)}."
        raise ConfigError([Problem(key="eval.metric", value=name, rule=rule)])
    every = run.cfg.eval
    due = every_steps_or_epochs(lambda: None, every.every_steps, every.every_epochs, run.plan.steps_per_epoch)
    return metrics[name] if any(trigger.next_after(since) <= run.state.step for trigger in due) else None
