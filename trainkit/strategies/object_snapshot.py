"""Detect the Python objects that a forward pass changes, in addition to tensors.

Parameters and buffers are tensors that a strategy synchronizes. A counter, a list of losses or a cache that a forward
pass keeps on a module, or that one block leaves for another, is a Python object: `ObjectSnapshot` compares such
objects and restores them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from trainkit.errors import TrainingError

_OF_TORCH: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of `nn.Module` itself: parameters, buffers, children and hooks."""
_WITHOUT_STATE: Final = ("torch", "trainkit")
"""Packages whose objects have no state that the code of a user's model writes."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_OBJECT = (*_PLAIN, Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_CONTAINERS = (dict, list, set, deque, tuple)
_ABSENT: Final = object()


class ObjectSnapshot:
    """A snapshot of the state of some values: attributes of modules and objects, entries of containers, at any depth.

    Tensors, and the modules inside of a module, are compared by identity, not by content.

    Example:
        >>> module = nn.Module()
        >>> module.calls, module.kept = 0, []
        >>> before = ObjectSnapshot([("", module)])
        >>> module.calls += 1
        >>> module.kept.append(1)
        >>> before.changed()
        [('calls', 'int'), ('kept', 'list')]
        >>> before.restore()
        >>> module.calls, module.kept
        (0, [])
    """

    def __init__(self, values: Iterable[tuple[str, object]]) -> None:
        self._entries: list[tuple[str, Any, dict[Any, Any]]] = []
        visited: set[int] = set()
        for name, value in values:
            (self._keep if isinstance(value, nn.Module) else self._walk)(name, value, visited)

    def changed(self) -> list[tuple[str, str]]:
        """Return the name and the class of each attribute or container that has changed."""
        return list(dict.fromkeys(difference for entry in self._entries for difference in _differences(*entry)))

    def changed_class(self) -> str | None:
        """Return the class of the first object or container that has changed; None if none has."""
        return next(
            (class_name(holder) for path, holder, before in self._entries if any(_differences(path, holder, before))),
            None,
        )

    def restore(self) -> None:
        """Restore the content of each attribute and container."""
        for _, holder, before in self._entries:
            if isinstance(holder, list | deque):
                holder.clear()
                holder.extend(before.values())
            elif isinstance(holder, dict | set):
                holder.clear()
                holder.update(before)
            else:
                current = _content(holder)
                for key in current.keys() - before.keys():
                    object.__delattr__(holder, key)
                for key, inner in before.items():
                    if not _is_same(current.get(key, _ABSENT), inner):
                        object.__setattr__(holder, key, inner)

    def _walk(self, path: str, value: object, visited: set[int]) -> None:
        if id(value) in visited or isinstance(value, (*_NO_OBJECT, nn.Module)):
            return
        visited.add(id(value))
        if isinstance(value, _CONTAINERS) or type(value).__module__.partition(".")[0] not in _WITHOUT_STATE:
            self._keep(path, value, visited)

    def _keep(self, path: str, value: object, visited: set[int]) -> None:
        content = _content(value)
        if not isinstance(value, tuple):
            self._entries.append((path, value, content))
        for key, inner in content.items():
            of_object = f"{path}.{key}" if path else str(key)
            self._walk(f"{path}[{key!r}]" if isinstance(value, _CONTAINERS) else of_object, inner, visited)


def class_name(value: object) -> str:
    """Return the class of a value for a message.

    Example:
        >>> class_name([]), class_name(deque())
        ('list', 'collections.deque')
    """
    kind = Tensor if isinstance(value, Tensor) else type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" or kind is Tensor else f"{package}.{kind.__qualname__}"


def _content(holder: object) -> dict[Any, Any]:
    """Return the entries of a container by key or index, or the attributes of an object by name."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, set):
        return dict(zip(holder, holder, strict=True))
    if isinstance(holder, _CONTAINERS):
        return dict(enumerate(holder))
    state: Any = object.__getstate__(holder)  # of slots, too
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {key: inner for key, inner in {**(attributes or {}), **(slots or {})}.items() if key not in _OF_TORCH}


def _differences(path: str, holder: Any, before: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    after = _content(holder)
    if not isinstance(holder, _CONTAINERS):
        for key in {**before, **after}:
            new, old = after.get(key, _ABSENT), before.get(key, _ABSENT)
            if not _is_same(new, old):
                yield f"{path}.{key}" if path else key, class_name(old if new is _ABSENT else new)
    elif len(after) != len(before) or (
        after.keys() != before.keys()
        if isinstance(holder, set)
        else not all(
            _is_same(key, old_key) and _is_same(new, old)
            for (key, new), (old_key, old) in zip(after.items(), before.items(), strict=True)
        )
    ):
        yield path, class_name(holder)


def _is_same(left: object, right: object) -> bool:
    """Return whether two values are one object, or equal numbers or texts of one type."""
    if left is right:
        return True
    if type(left) is not type(right) or not isinstance(left, _PLAIN):
        return False
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124 - two NaN are the same


def refuse_changes(
    before: ObjectSnapshot, block: str, because: str, *, otherwise: str = "use strategy=mirrored"
) -> None:
    """Raise an error if a block has changed a container or an object among its arguments.

    Args:
        before: the arguments before the call.
        block: name of the block for the user.
        because: why this is refused.
        otherwise: the remedy for a block that cannot be changed.

    Raises:
        TrainingError: it has changed one.
    """
    kind = before.changed_class()
    if kind is not None:
        raise TrainingError(
            f"the block {block} changes the {kind} among its arguments, {because}. Return what it adds, or {otherwise}."
        )


def cache_switch(model: nn.Module) -> str | None:
    """Return the key that turns off the cache of keys and values of a model of transformers; None if none is on."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            return f"config.use_cache=false of model.{name}" if name else "model.config.use_cache=false"
    return None


def watch_first_call(module: nn.Module, block: str, because: str, *, otherwise: str) -> None:
    """Apply `refuse_changes` to the first call of a block, by hooks that are then removed."""
    snapshots: list[ObjectSnapshot] = []

    def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        snapshots.append(ObjectSnapshot([("", (args, kwargs))]))

    def after(_module: nn.Module, _args: object, _kwargs: object, _outputs: object) -> None:
        for handle in handles:
            handle.remove()
        refuse_changes(snapshots[-1], block, because, otherwise=otherwise)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
