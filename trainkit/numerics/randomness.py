"""Keyed randomness: what a block of the model draws depends on (seed, step, shard, block) alone.

Torch's generators are streams: what a dropout draws depends on everything drawn before it, on this process. Here each
block gets a fresh key on entry, so that its masks are the same on whatever device, process, pipeline stage or
recomputation it runs. A block is an element of a ModuleList or Sequential, or else a top-level child of the model;
its key is its canonical name.

The model's own code between blocks is keyed as the block ''. Python's `random` and NumPy inside a forward pass are
not covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainkit.numerics.hashing import hash64, key32, mix64, name_id

__all__ = ["BlockKeys", "blocks_of", "draws_at_random", "draws_nothing", "keys_of", "sample_key", "sets_key"]

_MASK = (1 << 64) - 1

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


class BlockKeys:
    """Hooks that key torch's default generators on entry to each block that may draw random numbers.

    Args:
        model: the model; hooks are attached to it for its lifetime.
        seed: the run's seed.
        devices: those whose generators the model draws from (the CPU's is keyed as well).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> keys = BlockKeys(model, seed=0, devices=[torch.device("cpu")])
        >>> keys.enter(step=3, shard=1)
        >>> first = model(torch.ones(1, 2))
        >>> torch.equal(first, model(torch.ones(1, 2)))
        True
    """

    def __init__(self, model: nn.Module, *, seed: int, devices: Iterable[torch.device]) -> None:
        self._seed = seed
        self._state = 0
        self._generators = [torch.default_generator]
        for device in devices:
            if device.type == "cuda":
                torch.cuda.init()  # type: ignore[no-untyped-call]
                self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.names = tuple(name for name, block in blocks_of(model) if not draws_nothing(block))
        for name, block in blocks_of(model):
            if name in self.names:
                block.register_forward_pre_hook(self._key_setter(name_id(name)))
        for module in model.modules():
            _KEYS[module] = self

    def enter(self, *, step: int, shard: int) -> None:
        """Say which step and shard the coming forward passes belong to."""
        if self.names:
            self._state = hash64(self._seed, step, shard)

    @property
    def state(self) -> int:
        """The step and shard that forward passes belong to now, for `at`."""
        return self._state

    @contextmanager
    def at(self, state: int) -> Iterator[None]:
        """Let the forward passes inside belong to the step and shard of an earlier `state`: a recomputation's."""
        now, self._state = self._state, state
        try:
            yield
        finally:
            self._state = now

    def _key_setter(self, block_id: int) -> Any:
        generators = self._generators

        def set_key(_module: nn.Module, _inputs: tuple[Any, ...]) -> None:
            key = mix64(self._state ^ block_id) & 0xFFFFFFFF
            for generator in generators:
                generator.manual_seed(key)

        set_key.sets_key = True  # type: ignore[attr-defined]
        return set_key


_KEYS: WeakKeyDictionary[nn.Module, BlockKeys] = WeakKeyDictionary()


def keys_of(module: nn.Module) -> BlockKeys | None:
    """The keys of the model that a module is part of; None before it has some."""
    return _KEYS.get(module)


def sets_key(hook: object) -> bool:
    """Whether a forward hook is one of those that key a block's randomness."""
    return getattr(hook, "sets_key", False)


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """The key of a sample's augmentation: the same on whichever worker, rank or attempt it is read."""
    return key32(seed, epoch, sample, 0x617567)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model itself as '', then its blocks by canonical name, each module once."""
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
    """Whether a block's training forward certainly draws no random number: all its modules are torch's, none random.

    A class of the user's own may call anything in its forward, so it counts as drawing, unless it says otherwise: a
    class attribute `draws_nothing = True` speaks for its own code, not for the modules below it.
    """
    return all(_silent(type(module)) and not draws_at_random(module) for module in block.modules())


def _silent(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.") or bool(kind.__dict__.get("draws_nothing", False))


def draws_at_random(module: nn.Module) -> bool:
    """Whether this very module of torch's draws random numbers in training: a dropout with a rate above 0, say."""
    if not isinstance(module, _RANDOM):
        return False
    rate = getattr(module, "p", None)
    if rate is None:
        rate = getattr(module, "dropout", 1.0)
    return not (isinstance(rate, float | int) and rate == 0)
