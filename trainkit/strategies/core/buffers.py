"""What a forward pass changes beside the gradients: buffers of the model, and Python objects.

Buffers are, for example, the running statistics of batch normalisation. Each shard starts from the step's buffers;
their values after its forward pass are weighted by its share of the samples and summed like a gradient. Momentum thus
acts once per step, for any number of shards.

Parameters and buffers are tensors that a strategy synchronizes. A counter, a list of losses or a cache that a forward
pass keeps on a module, or that one block leaves for another, is a Python object: `ObjectSnapshot` compares such
objects and restores them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.strategies.core.buffer_groups import BufferGroup

_T = TypeVar("_T")


class StepBuffers:
    """The buffers of a model through the shards of a step.

    Buffers that no forward pass updates cost nothing. `watch` finds the updated ones in a forward pass, by torch's
    version counters; the ranks agree on them and pass them to `settle`. A ResNet-50 updates 159 buffers, most of a few
    hundred elements: they are read and written as one vector a dtype, in a few launches a shard.

    Args:
        dtype: of their sums.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.names = tuple(name for name, _ in model.named_buffers())
        self._all = [_owner(model, name) for name in self.names]
        self._chosen = self._all
        self._dtype = dtype
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._groups: list[BufferGroup] = []
        self._sums: list[Tensor] | None = None
        """A vector a group."""
        self._in_step = False

    @contextmanager
    def watch(self) -> Iterator[list[float]]:
        """Run a forward pass inside; the list then holds 1.0 for each buffer that it updated, in the order of `names`.

        The buffers are restored afterwards.
        """
        self.begin_step()
        before = self.versions()
        changed: list[float] = []
        yield changed
        changed.extend(self.changed_since(before))
        self.reset()

    def versions(self) -> list[tuple[int, int]]:
        """Return the versions of the buffers, for `changed_since` to compare with."""
        return [(id(tensor), tensor._version) for tensor in self.tensors()]  # noqa: SLF001 - has no public name

    def changed_since(self, before: Sequence[tuple[int, int]]) -> list[float]:
        """Return 1.0 for each buffer that a forward pass has updated since `versions` and the start of the step."""
        # Values too: torch's batch normalisation updates its statistics without counting a version.
        pairs = zip(self.tensors(), self._starts(), strict=True)
        differs = [not torch.equal(tensor, start) for tensor, start in pairs]
        after = self.versions()
        return [float(old != new or moved) for old, new, moved in zip(before, after, differs, strict=True)]

    def settle(self, changed: Sequence[float]) -> None:
        """Keep only the buffers that a forward pass updates, on any rank; also in the middle of a step."""
        kept = [place for place, flag in enumerate(changed) if flag]
        self._chosen = [self._all[place] for place in kept]
        if not self._groups:
            return
        starts, sums = self._starts(), None if self._sums is None else self._unjoined(self._sums)
        self._lay_out([starts[place] for place in kept])
        if sums is not None:
            self._sums = [group.joined(own) for group, own in self._split([sums[place] for place in kept])]

    def settle_like(self, other: StepBuffers) -> None:
        """Keep the same buffers as those of another copy of the model."""
        chosen = {id(place) for place in other._chosen}
        self._chosen = [own for own, its in zip(self._all, other._all, strict=True) if id(its) in chosen]

    def in_all_places(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sum for each buffer that a forward pass updates, in the order of `names`; None for the others."""
        found = dict(zip(map(id, self._chosen), sums, strict=True))
        return [found.get(id(place)) for place in self._all]

    def kept_names(self) -> list[str]:
        """Return the names of the buffers that a forward pass updates."""
        kept = set(map(id, self._chosen))
        return [name for name, place in zip(self.names, self._all, strict=True) if id(place) in kept]

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the tensors that `take` returns."""
        return [tensor.shape for tensor in self.tensors()]

    def begin_step(self) -> None:
        """Store the values that every shard of the step starts from."""
        tensors = self.tensors()
        if [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] == self._layout:
            for group, own in self._split(tensors):
                group.begin_step(own)
        else:
            self._lay_out(tensors)
        self._sums = None
        self._in_step = True

    @torch.no_grad()
    def end_forward(self, share: float, within: Container[nn.Module] | None = None) -> None:
        """Read the buffers after a forward pass; before backward, which may recompute it.

        Args:
            share: this shard's samples over the step's.
            within: the modules that it ran; None: all.
        """
        if not self._chosen:
            return
        parts = [group.advanced(own).to(self._dtype) for group, own in self._split(self.tensors())]
        if within is None:
            torch._foreach_mul_(parts, share)
        else:
            shares = [share if owner in within else 0.0 for owner, _ in self._chosen]
            for part, (group, own) in zip(parts, self._split(shares), strict=True):
                torch._foreach_mul_(group.views(part), own)
        if self._sums is None:
            self._sums = parts
        else:
            torch._foreach_add_(self._sums, parts)

    def reset(self) -> None:
        """Restore the values of the start of the step; by `.data`, so that a later backward pass still works."""
        for group, own in self._split(self.tensors()):
            torch._foreach_copy_([tensor.data for tensor in own], group.starts)

    def recover(self) -> None:
        """Undo the changes of an interrupted step; does nothing between steps."""
        if self._in_step:
            self.reset()
            self._sums, self._in_step = None, False

    def take(self) -> list[Tensor]:
        """Return the sums over the shards since the last call; zeros if there was none."""
        sums, self._sums = self._sums, None
        if sums is None:
            sums = [torch.zeros_like(group.start, dtype=self._dtype) for group in self._groups]
        return self._unjoined(sums)

    def became_nonfinite(self, sums: Sequence[Tensor | None]) -> list[Tensor]:
        """Return () flags, one a device: whether a buffer that was finite is not finite in the sums over all shards."""
        pairs = zip(self._starts(), sums, strict=True)
        both = [(start, total) for start, total in pairs if total is not None and start.is_floating_point()]
        both = [(start, total) for start, total in both if total.numel()]
        flags = []
        for device in {total.device for _, total in both}:
            here = [(start, total) for start, total in both if total.device == device]
            before = torch.stack(_largest([start for start, _ in here]))
            after = torch.stack(_largest([total for _, total in here]))
            flags.append((torch.isfinite(before) & ~torch.isfinite(after)).any())
        return flags

    @torch.no_grad()
    def finish(self, sums: Sequence[Tensor | None]) -> None:
        """Set the buffers to the sums over all shards and ranks, for the next step."""
        for group, own in self._split(list(zip(self.tensors(), sums, strict=True))):
            group.write([tensor.data for tensor, _ in own], [total for _, total in own])
        self._in_step = False

    def tensors(self) -> list[Tensor]:
        """Return the current values of the buffers that a forward pass updates."""
        # Looked up each time: a module may put a new tensor in a buffer's place.
        return [tensor for owner, name in self._chosen if (tensor := owner._buffers[name]) is not None]  # noqa: SLF001

    def _lay_out(self, starts: Sequence[Tensor]) -> None:
        """Group buffers by device and dtype, and store their values at the start of the step."""
        self._layout = [(tensor.shape, tensor.dtype, tensor.device) for tensor in starts]
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, (_, dtype, device) in enumerate(self._layout):
            places.setdefault((device, dtype), []).append(place)
        self._groups = [BufferGroup(own, [starts[place] for place in own]) for own in places.values()]

    def _split(self, values: Sequence[_T]) -> list[tuple[BufferGroup, list[_T]]]:
        """Return each group with its own of some values, one a buffer."""
        return [(group, [values[place] for place in group.places]) for group in self._groups]

    def _unjoined(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors inside of the groups' vectors, in the order of the buffers."""
        found: dict[int, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            found.update(zip(group.places, group.views(flat), strict=True))
        return [found[place] for place in range(len(found))]

    def _starts(self) -> list[Tensor]:
        """Return the values at the start of the step, in the order of the buffers."""
        return self._unjoined([group.start for group in self._groups])


def _largest(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch._foreach_norm(tensors, float("inf"))  # noqa: SLF001 - what torch's own clipping calls


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


_OF_TORCH: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of `nn.Module` itself: parameters, buffers, children and hooks."""
_WITHOUT_STATE: Final = ("torch", "trainkit")
"""Packages whose objects have no state that a model's own code writes."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_OBJECT = (*_PLAIN, Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ABSENT: Final = object()


class ObjectSnapshot:
    """The state of some values at one moment: attributes of modules and objects, entries of containers, at any depth.

    Tensors, and the modules inside of a module, are compared by identity and not looked into.

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

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self._places: list[tuple[str, Any, Any]] = []
        seen: set[int] = set()
        for name, value in values:
            if isinstance(value, nn.Module):
                self._walk_object(name, value, seen)
            else:
                self._walk(name, value, seen)

    def changed(self) -> list[tuple[str, str]]:
        """Return the name and the class of each attribute or container that has changed."""
        return list(dict.fromkeys(found for place in self._places for found in _differences(*place)))

    def changed_class(self) -> str | None:
        """Return the class of the first object or container that has changed; None if none has."""
        return next(
            (class_name(holder) for path, holder, before in self._places if any(_differences(path, holder, before))),
            None,
        )

    def restore(self) -> None:
        """Restore the content of each attribute and container."""
        for _, holder, before in self._places:
            if isinstance(holder, list):
                holder[:] = before
            elif isinstance(holder, deque):
                holder.clear()
                holder.extend(before)
            elif isinstance(holder, dict | set):
                holder.clear()
                holder.update(before)
            else:
                _restore_object(holder, before)

    def _walk(self, path: str, value: Any, seen: set[int]) -> None:
        if id(value) in seen or isinstance(value, (*_NO_OBJECT, nn.Module)):
            return
        seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            copied = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
            self._places.append((path, value, copied))
        if isinstance(value, dict | list | set | deque | tuple):
            for key, inner in _entries(value):
                self._walk(f"{path}[{key!r}]", inner, seen)
        elif type(value).__module__.partition(".")[0] not in _WITHOUT_STATE:
            self._walk_object(path, value, seen)

    def _walk_object(self, path: str, value: Any, seen: set[int]) -> None:
        attributes = _attributes(value)
        self._places.append((path, value, attributes))
        for key, inner in attributes.items():
            self._walk(f"{path}.{key}" if path else key, inner, seen)


def class_name(value: Any) -> str:
    """Return the class of a value for a message.

    Example:
        >>> class_name([]), class_name(deque())
        ('list', 'collections.deque')
    """
    kind = Tensor if isinstance(value, Tensor) else type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" or kind is Tensor else f"{package}.{kind.__qualname__}"


def _attributes(value: Any) -> dict[str, Any]:
    found = {key: inner for key, inner in list(vars(value).items()) if key not in _OF_TORCH} if _has_dict(value) else {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in {"__dict__", "__weakref__"} and hasattr(value, key):
                found[key] = getattr(value, key)
    return found


def _has_dict(value: Any) -> bool:
    return hasattr(value, "__dict__")


def _restore_object(value: Any, before: Mapping[str, Any]) -> None:
    for key in _attributes(value).keys() - before.keys():
        object.__delattr__(value, key)
    for key, inner in before.items():
        if not _is_same(_attributes(value).get(key, _ABSENT), inner):
            object.__setattr__(value, key, inner)


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def _differences(path: str, holder: Any, before: Any) -> Iterator[tuple[str, str]]:
    if isinstance(holder, set):
        if holder != before:
            yield path, class_name(holder)
    elif isinstance(holder, dict | list | deque):
        now, then = _entries(holder), _entries(before)
        if len(now) != len(then) or not all(
            _is_same(key, other) and _is_same(one, two) for (key, one), (other, two) in zip(now, then, strict=True)
        ):
            yield path, class_name(holder)
    else:
        attributes = _attributes(holder)
        for key in dict.fromkeys((*before, *attributes)):
            one, two = attributes.get(key, _ABSENT), before.get(key, _ABSENT)
            if not _is_same(one, two):
                yield f"{path}.{key}" if path else key, class_name(two if one is _ABSENT else one)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are one object, or equal numbers or texts of one type."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, _PLAIN):
        return False
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - two NaN are the same


def refuse_changes(given: ObjectSnapshot, block: str, because: str) -> None:
    """Raise an error if a block has changed a container or an object among its arguments.

    Raises:
        TrainingError: it has changed one.
    """
    kind = given.changed_class()
    if kind is not None:
        raise TrainingError(
            f"the block {block} changes the {kind} that it is given, {because}. Return what it adds, or use "
            "strategy=mirrored."
        )


def watch_first_call(module: nn.Module, block: str, because: str) -> None:
    """Apply `refuse_changes` to the first call of a block, by hooks that are then removed."""
    given: list[ObjectSnapshot] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(ObjectSnapshot([("", (args, kwargs))]))

    def after(_module: nn.Module, _args: Any, _kwargs: Any, _outputs: Any) -> None:
        for handle in handles:
            handle.remove()
        refuse_changes(given[-1], block, because)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
