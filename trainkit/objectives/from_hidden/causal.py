"""Causal language models of transformers: check whether their scores are those of their output layer, and their loss is
plain cross entropy.

Some models change the output of the layer (a soft cap, a scale), or add a term to the loss. The source of their
`forward` is inspected, without running it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from torch import nn

_LOSS: Final = "loss_function"


def causal_output_layer(model: nn.Module) -> nn.Module | str | None:
    """Return the output layer of a model of transformers whose `logits` are its outputs; else the reason as text.

    None for another model.
    """
    kind: Any = type(model)
    ask: Any = getattr(kind, "get_output_embeddings", None)
    layer = ask(model) if inspect.isfunction(ask) else None
    if not isinstance(layer, nn.Module):
        return None
    name = next((name for name, child in model.named_children() if child is layer), None)
    if name is not None and _passes_on(kind, name):
        return layer
    return f"{kind.__name__} changes the output of its output layer"


def has_plain_loss(model: object) -> bool:
    """Return whether a model of transformers computes the mean cross entropy of each next label, and nothing else."""
    function = getattr(model, _LOSS, None)
    if getattr(function, "__name__", None) != "ForCausalLMLoss":
        return False
    kind: Any = type(model)
    return _adds_nothing(kind)


@lru_cache
def _passes_on(kind: Any, name: str) -> bool:
    """Return whether `forward` calls `self.NAME` once, and uses the result only for its loss and its `logits`."""
    tree = _forward_of(kind)
    if tree is None:
        return False
    places = [node for node in ast.walk(tree) if _is_own(node, name)]
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_own(node.value.func, name)
    ]
    if len(places) != 1 or len(made) != 1 or not isinstance(made[0].targets[0], ast.Name):
        return False
    variable = made[0].targets[0].id
    used = set(_named(tree, variable)) - {made[0].targets[0]}
    return used <= {*_in_loss(tree, variable), *_as_logits(tree, variable)}


@lru_cache
def _adds_nothing(kind: Any) -> bool:
    """Return whether `forward` assigns None or the result of its loss function to `loss`, and passes it all labels."""
    tree = _forward_of(kind)
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _is_named(node.target, "loss"):
            return False
        if isinstance(node, ast.Assign) and any(_is_named(one, "loss") for one in node.targets):
            value = node.value
            empty = isinstance(value, ast.Constant) and value.value is None
            if not empty and not (isinstance(value, ast.Call) and _is_own(value.func, _LOSS)):
                return False
    compared = {
        node.left
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
    }
    return set(_named(tree, "labels")) <= {*_in_loss(tree, "labels"), *compared}


def _forward_of(kind: Any) -> ast.AST | None:
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
        return ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return None


def _is_own(node: ast.AST, name: str) -> bool:
    """Return whether a node is `self.NAME`."""
    return isinstance(node, ast.Attribute) and node.attr == name and _is_named(node.value, "self")


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _named(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if _is_named(node, name))


def _in_loss(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the uses of a variable in the calls of the loss function, as an argument of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_own(node.func, _LOSS):
            yield from (one for one in [*node.args, *(each.value for each in node.keywords)] if _is_named(one, name))


def _as_logits(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the uses of a variable as the result's `logits`, or in `(logits,) + ...`, the result as a tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.Tuple):
            yield from (one for one in node.left.elts if _is_named(one, name))
        if isinstance(node, ast.keyword) and node.arg == "logits" and _is_named(node.value, name):
            yield node.value
