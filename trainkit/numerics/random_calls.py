"""Find code that may draw random numbers, by the names that its functions use.

The compiled code of a function lists every name that the function looks up. A name such as `rand` or `bernoulli_` among
them counts as a draw, even if it means something else. A draw behind a name that is resolved at run time is not found:
callers must watch the generators as well.
"""

from __future__ import annotations

import dis
import random
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Final

import numpy as np
import torch
from torch import nn

from trainkit.numerics.randomness import Draws, draws_at_random, draws_of

_RANDOM: Final = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"}
    | {"multinomial", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_", "rsample", "sample"}
    | {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
    | {"random", "default_rng", "Generator", "fractional_max_pool2d", "fractional_max_pool3d", "manual_seed"}
    | {"dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "alpha_dropout", "feature_alpha_dropout"}
    | {"feature_dropout", "shuffle", "choice", "choices", "uniform", "permutation", "standard_normal"}
    | {"gauss", "normalvariate", "lognormvariate", "expovariate", "betavariate", "triangular", "randrange"}
    | {"getrandbits", "randbytes", "random_sample", "integers"}
)
"""Functions and methods of torch, `random` and NumPy that draw random numbers."""
_MODULES: Final[tuple[ModuleType, ...]] = (random, np.random)
_GENERATORS: Final = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_LIBRARIES: Final = frozenset({"torch", "numpy", "random", "math", "builtins"})
_BEGINS: Final = ("forward", "loss")
"""The methods of a model and of an objective that a step calls."""


def random_call(model: nn.Module, objective: object) -> str | None:
    """Describe the first call in a step that may draw random numbers, such as `Net.forward calls randn`; None if none
    is found.

    That is a random module of torch, or a function that uses the name of a random function. The methods `forward` of
    the model's modules and `loss` of the objective are read, and every method and function that is called by name from
    there. Classes that declare `draws_nothing` are not read, nor is code of torch and NumPy.

    Example:
        >>> random_call(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), None)
        '1: Dropout'
        >>> random_call(nn.Linear(2, 2), None) is None
        True
    """
    for name, module in model.named_modules():
        if draws_at_random(module):
            return f"{name or 'the model'}: {type(module).__name__}"
    kinds = dict.fromkeys([*map(type, model.modules()), type(objective)])
    read = [kind for kind in kinds if draws_of(kind) is not Draws.nothing]
    for kind in read:
        if kind.__dict__.get("runs_user_code", False):
            return f"{kind.__name__} runs code of another class"
    return _first_call(_methods(read))


def _first_call(methods: dict[str, list[FunctionType]]) -> str | None:
    """Return the first use of a random function that is reachable from the methods that a step calls."""
    pending = [function for name in _BEGINS for function in methods.get(name, ())]
    seen = {function.__code__ for function in pending}
    while pending:
        one = pending.pop(0)
        used: dict[str, bool] = {}
        for name, of_self in _names(one.__code__):
            used[name] = used.get(name, True) and of_self
        values = [one.__globals__.get(name) for name in used] + _cells(one)
        if (
            found := next((name for name, of_self in used.items() if name in _RANDOM and not of_self), None)
        ) is not None:
            return f"{one.__qualname__} calls {found}"
        if any(map(_is_random, values)):
            return f"{one.__qualname__} calls random"
        called = [function for name in used for function in methods.get(name, ())]
        for function in [*called, *(function for value in values for function in _own(value))]:
            if function.__code__ not in seen:
                seen.add(function.__code__)
                pending.append(function)
    return None


def _is_random(value: object) -> bool:
    """Return whether a value is a module or generator of random numbers, or a method of such an object."""
    of_module = any(value is module for module in _MODULES)
    return of_module or isinstance(value, _GENERATORS) or isinstance(getattr(value, "__self__", None), _GENERATORS)


def _methods(kinds: Iterable[type]) -> dict[str, list[FunctionType]]:
    """Return the methods of classes and their base classes, by name."""
    found: dict[str, list[FunctionType]] = {}
    for one in dict.fromkeys(parent for kind in kinds for parent in kind.__mro__):
        if one is not object and draws_of(one) is not Draws.nothing:
            for name, value in vars(one).items():
                found.setdefault(name, []).extend(_own(value.fget if isinstance(value, property) else value))
    return found


def _own(value: object) -> Iterator[FunctionType]:
    """Yield the function behind a value, unless it belongs to a library."""
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in _LIBRARIES:
        yield value


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the names that code looks up, and whether it does so in `self`, whose modules and methods are read."""
    before: dis.Instruction | None = None
    for one in dis.get_instructions(code):
        of_self = before is not None and before.opname.startswith("LOAD_FAST") and before.argval == "self"
        if isinstance(one.argval, str) and one.argval in code.co_names:
            yield one.argval, of_self
        before = one
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _cells(function: FunctionType) -> list[object]:
    found: list[object] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is filled later
            continue
    return found
