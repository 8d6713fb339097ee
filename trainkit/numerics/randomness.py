"""Keyed randomness: random numbers inside a step depend on (seed, step, shard, block) alone.

Torch's generators are streams: the numbers of a dropout depend on everything drawn before it in this process. Here each
block gets a fresh key on entry, so that its masks are the same on any device, process, pipeline stage or recomputation.
A block is an element of a ModuleList or Sequential, or else a top-level child of the model; its key is its canonical
name. The model's own code is the block '', and the objective's the block `objective`. Code that continues after a block
has returned gets a new key, so that it does not depend on what that block has drawn.

Python's `random` and NumPy are keyed once per shard, for models and objectives whose classes are not torch's or
trainkit's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from trainkit.numerics.generators import generators_of, hash64, key32, mix64, name_id, seed_host

# No module has such a name: module names have no parentheses.
_OBJECTIVE: Final = name_id("objective()")
_HOST: Final = name_id("host()")
_EVALUATION: Final = name_id("evaluation()")


@dataclass(frozen=True, slots=True)
class Moment:
    """A position in the computation of a step."""

    state: int
    """Hash of seed, step and shard."""
    counts: dict[int, int]
    """Number of times each part was keyed in this shard."""


class BlockKeys:
    """Hooks that key torch's default generators on entry to each block that may draw random numbers.

    A block that is called again for the same shard gets another key, and so does code that continues after a block.

    Args:
        devices: devices whose generators the model draws from (the CPU's is keyed as well).
        drawing: the parts of the model that may draw; None: determine it from the current classes.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> keys = BlockKeys(model, seed=0, devices=[torch.device("cpu")])
        >>> keys.enter(step=3, shard=1)
        >>> first = model(torch.ones(1, 2))
        >>> keys.enter(step=3, shard=1)
        >>> torch.equal(first, model(torch.ones(1, 2)))
        True
    """

    def __init__(
        self, model: nn.Module, *, seed: int, devices: Iterable[torch.device], drawing: Drawing | None = None
    ) -> None:
        self._model, self._seed = ref(model), seed
        self.drawing = Drawing.of(model) if drawing is None else drawing
        """Parts of the model that may draw."""
        self._state = 0
        self._counts: dict[int, int] = {}
        self._objective = Draws.nothing
        self._watches_model = False
        self._generators = generators_of(devices)
        self._on_host = all(device.type == "cpu" for device in devices)
        self.silent = False
        """Whether no key is set: nothing draws random numbers, or a captured graph contains the hooks."""
        self.names = tuple(name for name, _ in blocks_of(model) if name in self.drawing.keyed)
        self._register(model, lambda hook: hook)
        for module in model.modules():
            _KEYS[module] = self

    def _register(self, model: nn.Module, adapted: Callable[[Any], Any]) -> None:
        for name, block in blocks_of(model):
            if isinstance(block, torch.jit.ScriptModule):
                continue  # takes no hooks: it draws with the key of the code that calls it
            if name in self.drawing.keyed:
                block.register_forward_pre_hook(adapted(_hook(self, partial(self._set_key, name_id(name)))))
            if name in self.drawing.returned:
                block.register_forward_hook(adapted(_hook(self, partial(self._set_key, name_id(f"{name}()")))))

    def retire(self) -> None:
        """Remove the hooks if the model draws nothing, because compiled code checks each hook in each call."""
        if (model := self._model()) is not None:
            forget_keys(model)
            self._watches_model = False

    def resume(self) -> None:
        """Register the hooks again, outside of compiled code."""
        if (model := self._model()) is not None:
            self.retire()
            self._register(model, torch.compiler.disable)

    def enter(self, *, step: int, shard: int, objective: object = None, calls: int = 0, part: int = 0) -> None:
        """Key the computation of a shard, by an objective or the model alone, after `calls` calls of the model.

        `part` is the number of a pass over the shard, 0 where a step has one.
        """
        parts = (self._seed, step, shard)
        self._enter((*parts, part) if part else parts, objective, calls)

    def enter_evaluation(self, *, batch: int, objective: object) -> None:
        """Key the following computation of a batch of an evaluation."""
        self._enter((self._seed, _EVALUATION, batch), objective, 0)

    def draw_on_host(self, objective: object) -> bool:
        """Return whether the model or the objective may draw from generators that all threads of a process share."""
        most = self.drawing.at_most(objective)
        return most is Draws.anything or (self._on_host and most is not Draws.nothing)

    @property
    def moment(self) -> Moment:
        """The current shard and the position in it, for `at`."""
        return Moment(self._state, dict(self._counts))

    @property
    def beginning(self) -> Moment:
        """The beginning of the current shard, for `at`."""
        return Moment(self._state, {})

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """Let the forward passes inside continue from an earlier moment, as a recomputation does."""
        saved = self._state, self._counts
        self._state, self._counts = moment.state, dict(moment.counts)
        try:
            yield
        finally:
            self._state, self._counts = saved

    def silence(self, *, silent: bool) -> None:
        """Set whether no key is set from now on."""
        self.silent = silent

    def _enter(self, parts: tuple[int, ...], objective: object, calls: int) -> None:
        if self.silent:
            return
        self._objective, most = draws_of(type(objective)), self.drawing.at_most(objective)
        if most is Draws.nothing:
            return
        self._state, self._counts = hash64(*parts), {}
        if most is Draws.anything:
            seed_host(mix64(self._state ^ _HOST) & 0xFFFFFFFF)
        if self._objective is not Draws.nothing:
            self._counts[_OBJECTIVE] = calls
            self._set_key(_OBJECTIVE)
            self._watch_model()

    def _watch_model(self) -> None:
        """Key the objective again whenever a call of the model returns to the objective."""
        if self._watches_model:
            return
        self._watches_model = True

        def set_key() -> None:
            if self._objective is not Draws.nothing:
                self._set_key(_OBJECTIVE)

        if (model := self._model()) is not None:
            model.register_forward_hook(_hook(self, set_key))

    def _set_key(self, part: int) -> None:
        count = self._counts.get(part, 0)
        self._counts[part] = count + 1
        key = mix64(self._state ^ part)
        if count:
            key = mix64(key ^ count)
        for generator in self._generators:
            generator.manual_seed(key & 0xFFFFFFFF)


def _hook(keys: BlockKeys, set_key: Callable[[], None]) -> Any:
    def hook(_module: nn.Module, _inputs: Any, _outputs: Any = None) -> None:
        if keys.silent:
            return
        if _NOTING:
            _NOTING[-1](set_key)
        else:
            set_key()

    hook.sets_key = True  # type: ignore[attr-defined]
    return hook


_NOTING: Final[list[Callable[[Callable[[], None]], None]]] = []


@contextmanager
def noting_keys(note: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Pass each function that would set a key to `note`, and set no key: the model is only run for inspection."""
    _NOTING.append(note)
    try:
        yield
    finally:
        _NOTING.pop()


def forget_keys(model: nn.Module) -> None:
    """Remove the key hooks from a copy of a model, which gets its own hooks."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - has no public name
            for number in [number for number, hook in hooks.items() if sets_key(hook)]:
                del hooks[number]


_KEYS: WeakKeyDictionary[nn.Module, BlockKeys] = WeakKeyDictionary()


def keys_of(module: nn.Module) -> BlockKeys | None:
    """Return the keys of the model that contains a module; None before it has any."""
    return _KEYS.get(module)


def sets_key(hook: object) -> bool:
    """Return whether a forward hook keys a block's randomness."""
    return getattr(hook, "sets_key", False)


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """Return the key of a sample's augmentation: the same on any worker, rank or attempt."""
    return key32(seed, epoch, sample, 0x617567)


def shard_key(seed: int, epoch: int, first: int) -> int:
    """Return the key of the random numbers of a collate, for the shard whose first sample is `first`."""
    return key32(seed, epoch, first, 0x636F6C6C)


def transform_key(seed: int, step: int, shard: int) -> int:
    """Return the key of the random numbers of a batch transform, for a shard of a step."""
    return key32(seed, step, shard, 0x62617463)


# Modules of torch whose forward pass draws random numbers in training; every other module of torch.nn draws none.
_RANDOM = (
    nn.modules.dropout._DropoutNd,  # noqa: SLF001 - the base class of all dropouts has no public name
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


class Draws(IntEnum):
    """Generators from which some code may draw."""

    nothing = 0
    torch = 1
    anything = 2
    """Torch's generator, `random` and NumPy: a user's own code."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The parts of a model that may draw random numbers, computed before a strategy changes the classes of modules."""

    keyed: frozenset[str]
    """Blocks that are keyed on entry."""
    returned: frozenset[str]
    """Blocks after which the calling code is keyed again."""
    most: Draws
    """Upper bound of the generators from which the model's code draws."""

    def at_most(self, objective: object) -> Draws:
        """Return the upper bound for the model and an objective."""
        return max(self.most, draws_of(type(objective)))

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Inspect the classes of a model's modules.

        Example:
            >>> found = Drawing.of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
            >>> sorted(found.keyed), sorted(found.returned)
            (['', '1'], [])
        """
        blocks = dict(blocks_of(model))
        name_of = {id(block): name for name, block in blocks.items()}
        draws: dict[str, Draws] = {}
        callers: dict[str, str] = {}
        seen: set[int] = set()

        def look(module: nn.Module, block: str) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            name = name_of.get(id(module), block)
            if name and name != block:
                callers[name] = block
            draws[name] = max(draws.get(name, Draws.nothing), _own_draws(module))
            for child in module.children():
                look(child, name)

        look(model, "")
        return cls(
            keyed=frozenset(name for name, block in blocks.items() if not draws_nothing(block)),
            returned=frozenset(name for name, caller in callers.items() if draws[caller] is not Draws.nothing),
            most=max(draws.values()),
        )


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model itself as '', then its blocks by canonical name, each module once."""
    seen = {id(model)}
    yield "", model
    for name, module in _inner_blocks(model, "", top=True):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _inner_blocks(module: nn.Module, prefix: str, *, top: bool) -> Iterator[tuple[str, nn.Module]]:
    container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and (container or top):
            yield full, child
        yield from _inner_blocks(child, f"{full}.", top=False)


def draws_nothing(block: nn.Module) -> bool:
    """Return whether a block certainly draws no random numbers in training: all its modules are non-random ones of
    torch.

    A user's class may call anything in its forward, so it counts as drawing unless it declares otherwise: the class
    attribute `draws_nothing = True` covers its own code, not the modules below it. Call this before a strategy changes
    the model: FSDP changes the classes of modules.
    """
    return all(_own_draws(module) is Draws.nothing for module in block.modules())


def _own_draws(module: nn.Module) -> Draws:
    """Return the generators from which the code of this module itself may draw."""
    return Draws.torch if draws_at_random(module) else draws_of(type(module))


_QUIET: Final = ("torch.nn.", "torchao.float8.")
"""Packages whose layers draw nothing, except for the random ones of torch."""


_FOUND: Final[dict[type, Draws]] = {}
"""Results of `draws_of`, which every step uses."""


def draws_of(kind: type) -> Draws:
    """Return the generators from which the code of a class may draw; a parent's `draws_nothing` does not cover
    overridden code.
    """
    if kind not in _FOUND:
        _FOUND[kind] = Draws.anything
        if kind is type(None) or kind.__module__.startswith(_QUIET) or kind.__dict__.get("draws_nothing", False):
            _FOUND[kind] = Draws.nothing
        elif kind.__module__.startswith("trainkit.") and not kind.__dict__.get("runs_user_code", False):
            _FOUND[kind] = Draws.torch
    return _FOUND[kind]


def draws_at_random(module: nn.Module) -> bool:
    """Return whether this module of torch draws random numbers in training: a dropout with rate > 0, for example."""
    if not isinstance(module, _RANDOM):
        return False
    rate = getattr(module, "p", None)
    if rate is None:
        rate = getattr(module, "dropout", 1.0)
    return not (isinstance(rate, float | int) and rate == 0)
