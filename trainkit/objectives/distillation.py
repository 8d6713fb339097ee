"""Distillation: learn the classes and the scores of a trained teacher, which is a frozen model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.fields import above, maths, unit, within
from trainkit.numerics.copies import copied
from trainkit.numerics.precision import cast_inputs, converted_floats
from trainkit.objectives.base import Loss, Metric, Model, Objective
from trainkit.objectives.classification import ScoredClasses, class_loss
from trainkit.objectives.fields import exact, scores_of, split_batch
from trainkit.objectives.metrics import fresh_metrics, top_k

LoadRun = Callable[[str, Literal["best", "last"]], nn.Module]
"""(run folder, which checkpoint) -> its trained model, on the CPU."""


class FrozenModel:
    """A model in evaluation mode, without gradients, on the device of its inputs.

    It is an attribute of an objective, so it is not part of the trained model, the optimizer or a checkpoint. Each
    process that computes a loss has one copy per device, in the dtype of the run's parameters.

    Args:
        source: the model, or the folder of a run that trained it.
        checkpoint: the checkpoint of a run folder to load.

    Example:
        >>> teacher = FrozenModel(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
        >>> scores = teacher(torch.ones(4, 2))
        >>> tuple(scores.shape), scores.requires_grad
        ((4, 3), False)
    """

    def __init__(self, source: nn.Module | str, checkpoint: Literal["best", "last"] = "best") -> None:
        self.source, self.checkpoint = source, checkpoint
        self._dtype: torch.dtype | None = None
        self._load: LoadRun | None = None
        self._copies: dict[torch.device, nn.Module] = {}
        self._lock = Lock()  # replicas of one process share the objective

    def bind(self, *, dtype: torch.dtype, load: LoadRun) -> None:
        """Set the dtype of its parameters and the function that loads a run folder; the model is loaded when it is
        first called.
        """
        self._dtype, self._load = dtype, load

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating inputs are converted to its dtype."""
        leaves = tree_leaves((args, kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        model = self._copies.get(device)
        if model is None:
            with self._lock:
                model = self._copies.get(device) or self._copy_on(device)
        with torch.no_grad():
            return model(*args, **kwargs)

    def _copy_on(self, device: torch.device) -> nn.Module:
        if self._copies:
            model = copied(next(iter(self._copies.values()))).to(device)
        else:
            model = self._loaded().eval().requires_grad_(requires_grad=False).to(device)
            if self._dtype is not None:
                converted_floats(model, self._dtype)
                if self._dtype is not torch.float32:
                    cast_inputs(model, self._dtype)
        self._copies[device] = model
        return model

    def _loaded(self) -> nn.Module:
        if isinstance(self.source, nn.Module):
            return self.source
        if self._load is None:
            raise TrainingError(f"no function was set to load {self.source}: call bind before the first batch.")
        return self._load(self.source, self.checkpoint)


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
    share: Annotated[float, within(0, 1), unit("a share, 0 to 1")] = 0.5
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
        args = inputs if isinstance(self.input, list | tuple) else (inputs,)
        outputs = scores_of(model(*args), self.output)
        scores, teacher_scores = exact(outputs), exact(scores_of(self._teacher(*args)))
        if scores.shape != teacher_scores.shape:
            raise TrainingError(
                f"the model gives scores {tuple(scores.shape)}, and its teacher {tuple(teacher_scores.shape)}: both "
                "need the same classes."
            )
        labels = class_loss(outputs, targets, ignore_index=self.ignore_index)
        dim = self.class_dim
        student, soft = (functional.log_softmax(logits / self.temperature, dim) for logits in (scores, teacher_scores))
        if labels.counted is not None:  # zeros where a target is ignored add nothing
            student, soft = (torch.where(labels.counted.unsqueeze(dim), logs, 0.0) for logs in (student, soft))
        factor = self.temperature**2 if self.temperature_squared else 1.0
        return Loss.of_terms(
            {"labels": labels.loss_sum, "teacher": functional.kl_div(student, soft, reduction="sum", log_target=True)},
            labels.weight,
            factors={"labels": 1 - self.share, "teacher": self.share * factor},
            outputs=outputs,
            targets=labels.targets,
            counted=labels.counted,
            class_dim=dim,
        )

    def metrics(self) -> dict[str, Metric]:
        """Return accuracy, and the metrics of the config."""
        return {"accuracy": top_k(), **fresh_metrics(self.extra_metrics)}
