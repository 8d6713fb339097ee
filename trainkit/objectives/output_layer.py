"""Compute the loss where a model computes its scores: in its output layer, from the hidden states.

A model declares its output layer by `output_layer()`. While such a model runs in training, the layer returns the loss
of its inputs instead of scores, and the model's own forward passes it on. So the code around the layer keeps working:
hooks that gather its weight or move its inputs, a weight that it shares, compiled code.

Causal models of transformers declare theirs by `get_output_embeddings()`. Some of them change the output of the layer
(a soft cap, a scale), or add a term to the loss: the source of their `forward` is inspected, without running it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from trainkit.objectives.linear_cross_entropy import (
    CutVocabulary,
    ScoreRows,
    linear_cross_entropy,
    product_dtype,
    score_rows,
)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The output layer of a model, and the computation of its loss."""

    layer: nn.Linear
    """The layer with its current parameters: a strategy may gather them for the call."""
    score: ScoreRows = score_rows
    """Function that computes a chunk of rows."""
    part: CutVocabulary | None = None
    """The part of the vocabulary that this rank holds; None: all."""

    def loss_sum(self, hidden: Tensor, targets: Tensor, *, ignore_index: int, only_eager: bool) -> Tensor:
        """Sum the cross entropy of (..., features) hidden states against (...) tokens, chunk by chunk of rows.

        Args:
            hidden: on the device of the layer.
            targets: int64, possibly on another device.
            ignore_index: rows with this target do not count.
            only_eager: whether a compiled graph of the loss may compute it from all scores instead.
        """
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            self.layer.weight,
            targets.flatten(),
            bias=self.layer.bias,
            ignore_index=ignore_index,
            score=self.score,
            part=self.part,
            only_eager=only_eager,
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
    found = _inspected(model)
    is_usable = isinstance(found, OutputLayer) and product_dtype(found.layer.weight) is not torch.float16
    return found if is_usable else None  # type: ignore[return-value]


def reason_for_scores(model: nn.Module) -> str | None:
    """Return why the loss of a model is computed from its scores although it declares an output layer."""
    found = _inspected(model)
    return found if isinstance(found, str) else None


def _inspected(model: nn.Module) -> OutputLayer | str | None:
    """Return the output layer of a model as it is now, with its hooks; the reason, as text, why it cannot be used; None
    if the model declares none.
    """
    layer = offered_by(model)
    if not isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return f"its output layer is a {type(layer).__name__}"
    part = getattr(vars(layer).get("forward"), "cut_vocabulary", None)
    if part is None and "forward" in vars(layer):
        return "its output layer has another forward"
    known = _AROUND.get(model, ())
    if not known or known[0]() is not layer:
        holders = (one for one in model.modules() if any(inner is layer for inner in one.modules()))
        known = _AROUND[model] = (ref(layer), *map(ref, holders))
    of_all = nn.modules.module
    for module in filter(None, (one() for one in known)):
        forward = vars(module).get("forward") if module is not layer else None
        if forward is not None and not getattr(forward, "runs_once", False):
            return f"{type(module).__name__}, which holds its output layer, has another forward"
        hooks = chain(
            module._forward_pre_hooks.values(),  # noqa: SLF001 - has no public name
            module._forward_hooks.values(),  # noqa: SLF001 - as above
            of_all._global_forward_pre_hooks.values(),  # noqa: SLF001 - as above
            of_all._global_forward_hooks.values(),  # noqa: SLF001 - as above
        )
        if not all(map(_is_known, hooks)):
            return f"{type(module).__name__} has a hook that may read scores"
    return OutputLayer(layer, getattr(layer, "compiled_score_rows", score_rows), part)


_AROUND: Final[WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], ...]]] = WeakKeyDictionary()
"""Model -> its output layer, then the modules that hold it."""


def _is_known(hook: object) -> bool:
    """Return whether a hook belongs to torch or trainkit; such hooks leave outputs unchanged."""
    function = hook.func if isinstance(hook, partial) else hook
    name = getattr(function, "__module__", None) or type(function).__module__
    return name.partition(".")[0] in {"torch", "trainkit"}


@contextmanager
def scored_inside(layer: nn.Linear, score: Callable[[Tensor], object]) -> Iterator[None]:
    """Let a layer return the loss of its inputs for the duration of the block."""
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


class _Call:
    """The computation of a layer instead of its scores: one object for all steps, which avoids recompilation."""

    def __init__(self) -> None:
        self.score: Callable[[Tensor], object] | None = None
        self.run = self._run
        if "torch._dynamo" in sys.modules:  # the loop over chunks stays outside of compiled code
            self.run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def _run(self, hidden: Tensor) -> object:
        assert self.score is not None
        return self.score(hidden)


_CALLS: Final[WeakKeyDictionary[nn.Module, _Call]] = WeakKeyDictionary()


def offered_by(model: nn.Module) -> nn.Module | str | None:
    """Return the output layer that a model declares, or the reason why it cannot be used, or None if it declares
    none.
    """
    kind: Any = type(model)  # a module may have a child of one of these names
    for name in ("output_layer", "get_output_embeddings"):
        if not inspect.isfunction(offer := getattr(kind, name, None)):
            continue
        layer: Any = offer(model)
        if name == "output_layer":
            return layer  # type: ignore[no-any-return]
        if isinstance(layer, nn.Module):
            place = next((place for place, child in model.named_children() if child is layer), None)
            passes_on = place is not None and _passes_on(kind, place)
            return layer if passes_on else f"{kind.__name__} changes the output of its output layer"
    return None


def has_plain_loss(model: object) -> bool:
    """Return whether a model of transformers computes the mean cross entropy of each next label, and nothing else."""
    kind: Any = type(model)
    function = getattr(model, "loss_function", None)
    return getattr(function, "__name__", None) == "ForCausalLMLoss" and _adds_nothing(kind)


@lru_cache
def _passes_on(kind: Any, layer: str) -> bool:
    """Return whether `forward` calls `self.LAYER` once, and uses the result only for its loss and its `logits`."""
    above = _forward_of(kind)
    places = [node for node in above if _is_own(node, layer)]
    call = above[places[0]] if len(places) == 1 else None
    made = above[call] if isinstance(call, ast.Call) and call.func is places[0] else None
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return False
    variable = made.targets[0]
    uses = [node for node in above if isinstance(node, ast.Name) and node.id == variable.id and node is not variable]
    return all(_is_scored(node, above) or _is_returned(node, above) for node in uses)


@lru_cache
def _adds_nothing(kind: Any) -> bool:
    """Return whether `forward` assigns None or the result of its loss function to `loss`, and passes it all labels."""
    above = _forward_of(kind)
    for node in above:
        if isinstance(node, ast.Name) and node.id == "loss" and isinstance(node.ctx, ast.Store):
            value = getattr(above[node], "value", None) if isinstance(above[node], ast.Assign) else None
            is_loss = isinstance(value, ast.Call) and _is_own(value.func, "loss_function")
            if not is_loss and not (isinstance(value, ast.Constant) and value.value is None):
                return False
        if isinstance(node, ast.Name) and node.id == "labels" and not _is_scored(node, above):
            over = above[node]
            if not (isinstance(over, ast.Compare) and isinstance(over.ops[0], ast.Is | ast.IsNot)):
                return False
    return bool(above)


def _forward_of(kind: Any) -> dict[ast.AST, ast.AST]:
    """Return the nodes of the source of `forward`, each with the node above it; none if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _is_own(node: ast.AST, name: str) -> bool:
    """Return whether a node is `self.NAME`."""
    holder = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(holder, ast.Name) and holder.id == "self"


def _is_scored(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a variable is used as an argument of the loss function, by itself."""
    over = above[node]
    call = above[over] if isinstance(over, ast.keyword) else over
    return isinstance(call, ast.Call) and _is_own(call.func, "loss_function")


def _is_returned(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a variable is used as the result's `logits`, or in `(logits,) + ...`, the result as a tuple."""
    over = above[node]
    if isinstance(over, ast.Tuple):
        total = above[over]
        return isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add) and total.left is over
    return isinstance(over, ast.keyword) and over.arg == "logits"
