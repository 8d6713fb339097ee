"""Distillation: learn the classes and the scores of a trained teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.fields import above, maths, within
from trainkit.objectives.base import Loss, Metric, Model, Objective
from trainkit.objectives.classification import TopK
from trainkit.objectives.fields import exact, scores_of, split_batch
from trainkit.objectives.frozen import FrozenModel
from trainkit.objectives.metrics import fresh_metrics
from trainkit.objectives.targets import ScoredClasses, class_loss


@dataclass(frozen=True, kw_only=True)
class Distillation(ScoredClasses, Objective):
    """Cross entropy of the targets, and of the softened scores of a frozen teacher, summed over the targets that count.

    The loss is (1 - share) * labels + share * temperature^2 * teacher, where `teacher` is the Kullback-Leibler
    divergence of both models' scores over the temperature; `temperature_squared` set to false leaves temperature^2 out.
    Both terms are logged without their factors. Scores and targets are those of `Classification`; a target that is
    ignored counts in neither term.

    Example:
        >>> import torch
        >>> objective = Distillation(teacher=nn.Linear(2, 3), share=0.9)
        >>> loss = objective.loss(nn.Linear(2, 3), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])))
        >>> sorted(loss.terms), loss.weight
        (['labels', 'teacher'], tensor(4))

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531.
    """

    draws_nothing: ClassVar[bool] = True
    term_names: ClassVar[tuple[str, ...]] = ("labels", "teacher")

    teacher: Any
    """The folder of a run that trained it, or a node with `_target_` that builds a model with its weights."""
    teacher_checkpoint: Literal["best", "last"] = "best"
    """The checkpoint of the teacher's run."""
    temperature: Annotated[float, above(0)] = 2.0
    """Divisor of the scores of both models; a higher value gives unlikely classes more weight."""
    share: Annotated[float, within(0, 1)] = 0.5
    """The share of the teacher in the loss; the rest is the share of the targets."""
    temperature_squared: Annotated[bool, maths(neutral=True)] = True
    """Whether the term of the teacher has the factor temperature^2, as in the paper, so that the size of its gradient
    hardly depends on the temperature; false leaves the factor out.
    """
    _teacher: FrozenModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, str | nn.Module) or not self.teacher:
            rule = "must be the folder of a run, or a node with _target_ that builds a model."
            raise ConfigError([Problem(key="objective.teacher", value=repr(self.teacher), rule=rule)])
        object.__setattr__(self, "_teacher", FrozenModel(self.teacher, self.teacher_checkpoint))

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run both models on the inputs; (samples, classes, ...) scores, (samples, ...) int64 targets."""
        inputs, targets = split_batch(batch, self.input, self.target)
        given = inputs if isinstance(self.input, list | tuple) else (inputs,)
        outputs = scores_of(model(*given), self.output)
        scores, wanted = exact(outputs), exact(scores_of(self._teacher(*given)))
        if scores.shape != wanted.shape:
            raise TrainingError(
                f"the model gives scores {tuple(scores.shape)}, and its teacher {tuple(wanted.shape)}: both need the "
                "same classes."
            )
        labels = class_loss(scores, targets, ignore_index=self.ignore_index)
        dim = self.class_dim
        own, theirs = (functional.log_softmax(one / self.temperature, dim) for one in (scores, wanted))
        if labels.counted is not None:  # zeros where a target is ignored add nothing
            own, theirs = (torch.where(labels.counted.unsqueeze(dim), one, 0.0) for one in (own, theirs))
        factor = self.temperature**2 if self.temperature_squared else 1.0
        return Loss.of_terms(
            {"labels": labels.loss_sum, "teacher": functional.kl_div(own, theirs, reduction="sum", log_target=True)},
            labels.weight,
            factors={"labels": 1 - self.share, "teacher": self.share * factor},
            outputs=outputs,
            targets=labels.targets,
            counted=labels.counted,
            class_dim=dim,
        )

    def metrics(self) -> dict[str, Metric]:
        """Return accuracy, and the metrics of the config."""
        return {"accuracy": TopK(1), **fresh_metrics(self.extra_metrics)}
