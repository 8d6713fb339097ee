"""Compute the loss where a model computes its scores: in its output layer, from the hidden states.

A model declares its output layer by `output_layer()`. While such a model runs in training, the layer returns the loss
of its inputs instead of scores, and the model's own forward passes it on. So the code around the layer keeps working:
hooks that gather its weight or move its inputs, a weight that it shares, compiled code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves

from trainkit.errors import TrainingError
from trainkit.objectives.from_hidden.causal import causal_output_layer
from trainkit.objectives.from_hidden.cross_entropy import CutVocabulary, ScoreRows, score_rows
from trainkit.objectives.from_hidden.loss import Loss


class OffersOutputLayer(Protocol):
    """A model whose outputs are the scores of a linear layer, unchanged."""

    def output_layer(self) -> nn.Module:
        """Return this layer, an `nn.Linear`; its inputs are the hidden states."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The output layer of a model, and the computation of its loss."""

    layer: nn.Linear
    """The layer with its current parameters: a strategy may gather them for the call."""
    score: ScoreRows = score_rows
    """Function that computes a chunk of rows."""
    part: CutVocabulary | None = None
    """The part of the vocabulary that this rank holds; None: all."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The loss that a model returns instead of scores. It is not a tensor."""

    loss: Loss


def _flattened(scored: Scored) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(one.name for one in fields(scored.loss))
    return [getattr(scored.loss, name) for name in names], names


def _restored(values: Any, names: tuple[str, ...]) -> Scored:
    return Scored(Loss(**dict(zip(names, values, strict=True))))


# FSDP and device maps walk through the outputs of modules.
register_pytree_node(
    Scored, _flattened, _restored, serialized_type_name="trainkit.objectives.from_hidden.output_layer.Scored"
)

_KEEPS: Final[ContextVar[bool]] = ContextVar("keeps_scores", default=False)


@contextmanager
def scores_kept() -> Iterator[None]:
    """Let the models inside return their scores, for inspection."""
    token = _KEEPS.set(True)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def keeps_scores() -> bool:
    """Return whether models return their scores for inspection now."""
    return _KEEPS.get()


def output_layer_of(model: object) -> OutputLayer | None:
    """Return the output layer in which a loss can be computed now; None if scores are needed, or the model declares no
    such layer.

    Evaluation needs scores. A float16 layer keeps them too: the loss scale must multiply its gradients before they are
    rounded.

    Example:
        >>> from trainkit.models.gpt import Gpt
        >>> model = Gpt(vocab_size=8, context=4, num_layers=1, num_heads=1, width=4)
        >>> output_layer_of(model).layer is model.head.output, output_layer_of(model.eval())
        (True, None)
    """
    if not isinstance(model, nn.Module) or not model.training or not torch.is_grad_enabled() or _KEEPS.get():
        return None
    found = _FOUND.get(model)
    if found is None or found.marks != _marks(found.around):
        found = _FOUND[model] = _Found.of(model)
    offered = found.offered
    return None if offered is None or _in_float16(offered.layer.weight) else offered


def reason_for_scores(model: nn.Module) -> str | None:
    """Return why the loss of a model is computed from its scores although it declares an output layer."""
    return _Found.of(model).reason


@contextmanager
def scored_inside(layer: nn.Linear, score: Callable[[Tensor], Loss]) -> Iterator[None]:
    """Let a layer return the loss of its inputs (`Scored`) for the duration of the block."""
    call = _CALLS.get(layer)
    if call is None:
        call = _CALLS[layer] = _Call()
    before = vars(layer).get("forward")
    call.score = score
    layer.forward = call.run  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        call.score = None
        if before is None:
            del layer.forward
        else:
            layer.forward = before  # type: ignore[method-assign]


def found_loss(outputs: object) -> Loss:
    """Return the loss among the outputs of a model.

    Raises:
        TrainingError: the outputs do not hold exactly one.
    """
    leaves = tree_leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, Scored))
    found = [leaf for leaf in leaves if isinstance(leaf, Scored)]
    if len(found) != 1:
        raise TrainingError(
            f"the outputs of the model contain the result of its output_layer() {len(found)} times, and once was "
            f"expected. "
            "Use objective.cross_entropy=plain."
        )
    return found[0].loss


class _Call:
    """The computation of a layer instead of its scores: one object for all steps, which avoids recompilation."""

    def __init__(self) -> None:
        self.score: Callable[[Tensor], Loss] | None = None
        self.run = self._run
        if "torch._dynamo" in sys.modules:  # the loop over chunks stays outside of compiled code
            self.run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def _run(self, hidden: Tensor) -> Scored:
        assert self.score is not None
        return Scored(self.score(hidden))


@dataclass(frozen=True, slots=True)
class _Found:
    """The output layer that was found in a model."""

    offered: OutputLayer | None = None
    reason: str | None = None
    around: tuple[nn.Module, ...] = ()
    """The output layer and the modules that hold it."""
    marks: tuple[object, ...] = ()
    """Hooks and forward passes of these modules when the layer was found."""

    @classmethod
    def of(cls, model: nn.Module) -> _Found:
        """Inspect a model for its output layer."""
        layer = offered_by(model)
        holding = [one for one in model.modules() if any(inner is layer for inner in one.modules())]
        around = tuple(holding) if isinstance(layer, nn.Module) else ()
        return replace(cls._of(model), around=around, marks=_marks(around))

    @classmethod
    def _of(cls, model: nn.Module) -> _Found:
        layer = offered_by(model)
        if layer is None or isinstance(layer, str):
            return cls(reason=layer)
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            return cls(reason=f"its output layer is a {type(layer).__name__}")
        held = vars(layer).get("forward")
        part = getattr(held, "cut_vocabulary", None)
        if held is not None and part is None:
            return cls(reason="its output layer has another forward")
        for module in model.modules():
            around = vars(module).get("forward") if module is not layer else None
            if not any(one is layer for one in module.modules()):
                continue
            if around is not None and not getattr(around, "runs_once", False):
                return cls(reason=f"{type(module).__name__}, which holds its output layer, has another forward")
            if not all(map(_is_known, _hooks_of(module))):
                return cls(reason=f"{type(module).__name__} has a hook that may read scores")
        return cls(offered=OutputLayer(layer, getattr(layer, "compiled_score_rows", score_rows), part))


def offered_by(model: nn.Module) -> nn.Module | str | None:
    """Return the output layer that a model declares, or the reason why it cannot be used, or None if it declares
    none.
    """
    # look it up on the class: a module may have a child of this name
    offer: Any = getattr(type(model), "output_layer", None)
    if not inspect.isfunction(offer):
        return causal_output_layer(model)
    layer: nn.Module = offer(model)
    return layer


def _hooks_of(module: nn.Module) -> Iterator[object]:
    """Yield the hooks that a call of a module runs, those of all modules included."""
    of_all = nn.modules.module
    for hooks in (
        module._forward_pre_hooks,  # noqa: SLF001 - has no public name
        module._forward_hooks,  # noqa: SLF001 - as above
        of_all._global_forward_pre_hooks,  # noqa: SLF001 - as above
        of_all._global_forward_hooks,  # noqa: SLF001 - as above
    ):
        yield from hooks.values()


def _marks(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Return identities of the hooks and forward methods of modules, to detect changes.

    The id of a hook is used only once in a process.
    """
    of_all = nn.modules.module
    found: list[object] = [*of_all._global_forward_pre_hooks, *of_all._global_forward_hooks]  # noqa: SLF001 - as above
    for module in modules:
        found += (vars(module).get("forward"), *module._forward_pre_hooks, *module._forward_hooks)  # noqa: SLF001
    return tuple(found)


def _is_known(hook: object) -> bool:
    """Return whether a hook belongs to torch or trainkit; such hooks leave outputs unchanged."""
    function = hook.func if isinstance(hook, partial) else hook
    name = getattr(function, "__module__", None) or type(function).__module__
    return name.partition(".")[0] in {"torch", "trainkit"}


def _in_float16(weight: Tensor) -> bool:
    device = weight.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) is torch.float16
    return weight.dtype is torch.float16


_FOUND: Final[WeakKeyDictionary[nn.Module, _Found]] = WeakKeyDictionary()
_CALLS: Final[WeakKeyDictionary[nn.Module, _Call]] = WeakKeyDictionary()
