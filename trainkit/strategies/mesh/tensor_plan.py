"""Match the patterns of a plan with the modules of a model, and validate them.

A style defines how a module is sharded over the ranks of a replica: the dim of its weights, and the layouts of its
input and output. Activations between modules are plain tensors in one of three layouts: `whole` on every rank, `cut` in
the last dim (features), or a `stretch`, a slice of dim 1 (the sequence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from torch import Tensor, nn

from trainkit.config.values import closest
from trainkit.errors import Problem

Layout = Literal["whole", "cut", "stretch"]


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to shard a module."""

    name: str
    """Name of the style in a plan."""
    cuts: Mapping[type[nn.Module], Mapping[str, int]] = field(default_factory=dict)
    """Supported class -> parameter -> the sharded dim; empty: any module, whose parameters stay whole."""
    takes: Layout = "whole"
    """The layout of the input."""
    gives: Layout = "whole"
    """The layout of the output."""
    sums: bool = False
    """Whether every rank's output is a part of a sum that must be added up."""

    def dims(self, module: nn.Module) -> Mapping[str, int] | None:
        """Return parameter -> the sharded dim; None if the style does not support such a module."""
        return next((dims for kind, dims in self.cuts.items() if isinstance(module, kind)), None if self.cuts else {})


_ROWS: Final = {"weight": 0, "bias": 0}
_COLUMNS: Final = {"weight": 1}

STYLES: Final = {
    style.name: style
    for style in (
        Style(name="colwise", cuts={nn.Linear: _ROWS, nn.Embedding: _COLUMNS}, gives="cut"),
        Style(name="colwise_gathered", cuts={nn.Linear: _ROWS, nn.Embedding: _COLUMNS}),
        Style(name="colwise_sequence", cuts={nn.Linear: _ROWS}, takes="stretch", gives="cut"),
        Style(name="rowwise", cuts={nn.Linear: _COLUMNS, nn.Embedding: {"weight": 0}}, takes="cut", sums=True),
        Style(name="rowwise_scattered", cuts={nn.Linear: _COLUMNS}, sums=True),
        Style(name="rowwise_sequence", cuts={nn.Linear: _COLUMNS}, takes="cut", gives="stretch", sums=True),
        Style(name="dropout", cuts={nn.Dropout: {}}, takes="cut", gives="cut"),
        Style(name="sequence", takes="stretch", gives="stretch"),
        Style(name="sequence_split", gives="stretch"),
        Style(name="sequence_join", takes="stretch"),
    )
}
"""Style by its name in a plan."""


_KEY: Final = "strategy.plan"
_SIZE_KEY: Final = "strategy.tensor"


@dataclass(frozen=True, kw_only=True)
class MatchedModule:
    """A module that is sharded."""

    name: str
    module: nn.Module
    style: Style
    pattern: str
    """The pattern of the plan that names it."""


@dataclass(frozen=True, kw_only=True)
class MatchedPlan:
    """A plan matched with a model."""

    chosen: tuple[MatchedModule, ...] = ()
    """The sharded modules, in the order of the model."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Parameter, by canonical name -> the sharded dim."""
    problems: Sequence[Problem] = ()
    """The problems of the plan for this model."""


def match_plan(model: nn.Module, plan: Mapping[str, str] | Literal["auto"], degree: int) -> MatchedPlan:
    """Find the modules that a plan shards.

    A pattern is a module's name, or the end of one (`mlp.expand` matches that of every block), or a glob on whole names
    (`blocks.*.mlp.expand`), or one on classes (`type:Linear`). The first matching pattern applies.

    Args:
        model: the model, possibly on the meta device.
        plan: pattern -> style; `auto`: the plan of the model, `tensor_plan(degree)`.
        degree: number of ranks over which a module is sharded.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> match_plan(model, {"0": "colwise", "2": "rowwise"}, 2).dims
        {'0.weight': 0, '0.bias': 0, '2.weight': 1}
    """
    patterns = _plan_of_model(model, degree) if plan == "auto" else plan
    if isinstance(patterns, Problem):
        return MatchedPlan(problems=[patterns])
    chosen, problems = _chosen(model, patterns)
    if not problems:
        misfits = {match.pattern: problem for match in reversed(chosen) if (problem := _misfit(match, model, degree))}
        problems = list(misfits.values())  # of each pattern, that of its first module
    dims, tied = _dims(model, chosen)
    return MatchedPlan(chosen=tuple(chosen), dims=dims, problems=problems or tied)


def described(fit: MatchedPlan) -> str:
    """Describe the sharded modules and their styles.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> described(match_plan(model, {"0": "colwise", "2": "rowwise"}, 2))
        '0 colwise, 2 rowwise'
    """
    named: dict[tuple[str, str], list[str]] = {}
    for match in fit.chosen:
        named.setdefault((match.pattern, match.style.name), []).append(match.name)
    shown = (f"{members[0] if len(members) == 1 else pattern} {style}" for (pattern, style), members in named.items())
    return ", ".join(shown)


def _plan_of_model(model: nn.Module, degree: int) -> Mapping[str, str] | Problem:
    """Return the plan that a model provides."""
    make_plan = getattr(model, "tensor_plan", None)
    if make_plan is not None:
        plan: Mapping[str, str] = make_plan(degree)
        return plan
    kind = type(model).__name__
    rule = f"{kind} has no plan. Name its layers with their styles, {{expand:colwise,project:rowwise}}."
    return Problem(key=_KEY, value="auto", rule=rule)


def _chosen(model: nn.Module, plan: Mapping[str, str]) -> tuple[list[MatchedModule], list[Problem]]:
    modules = dict(model.named_modules())
    taken: dict[str, MatchedModule] = {}
    problems = []
    for pattern, word in plan.items():
        if word not in STYLES:
            near = closest(word, STYLES)
            hint = f"Did you mean {near}?" if near else f"There are: {', '.join(STYLES)}."
            rule = f"no such style. {hint}"
            problems.append(Problem(key=f"{_KEY}.{pattern}", value=word, rule=rule))
            continue
        names = _named(pattern, modules)
        if not names:
            problems.append(Problem(key=f"{_KEY}.{pattern}", value=word, rule=_unknown(pattern, modules)))
        elif all(name in taken for name in names):
            rule = f"names no remaining module: {names[0]} is in {taken[names[0]].pattern} already."
            problems.append(Problem(key=f"{_KEY}.{pattern}", value=word, rule=rule))
        for name in names:
            match = MatchedModule(name=name, module=modules[name], style=STYLES[word], pattern=pattern)
            taken.setdefault(name, match)
    if not plan:
        rule = "shards nothing. Name layers with their styles, {expand:colwise,project:rowwise}, or use auto."
        problems.append(Problem(key=_KEY, value="{}", rule=rule))
    return [taken[name] for name in modules if name in taken], problems


def _named(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that a pattern matches, never the model itself."""
    if pattern in modules:
        return [pattern] if pattern else []
    if pattern.startswith("type:"):
        kind = pattern.removeprefix("type:")
        return [name for name, module in modules.items() if name and fnmatchcase(type(module).__name__, kind)]
    if any(sign in pattern for sign in "*?["):
        return [name for name in modules if name and fnmatchcase(name, pattern)]
    return [name for name in modules if name.endswith(f".{pattern}")]


def _unknown(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    words = {name for name in modules if name}
    words |= {".".join(name.split(".")[-length:]) for name in words for length in range(1, name.count(".") + 2)}
    if pattern.startswith("type:"):
        words = {f"type:{type(module).__name__}" for module in modules.values()}
    near = closest(pattern, sorted(words))
    return f"no such module.{f' Did you mean {near}?' if near else ''}"


def _misfit(match: MatchedModule, model: nn.Module, degree: int) -> Problem | None:
    """Return why a module cannot be sharded by its style; None if it can."""
    style, module = match.style, match.module
    dims, key = style.dims(module), f"{_KEY}.{match.pattern}"
    if dims is None:
        suits = " and ".join(f"nn.{kind.__name__}" for kind in style.cuts)
        rule = f"{match.name} is a {type(module).__name__}, and {style.name} is for {suits}."
        return Problem(key=key, value=style.name, rule=rule)
    if dims and (why := _uncuttable(match, model)):
        return Problem(key=key, value=style.name, rule=why)
    for leaf, dim in dims.items():
        tensor = getattr(module, leaf, None)
        if isinstance(tensor, Tensor) and tensor.shape[dim] % degree:
            dim_text = f"the {tensor.shape[dim]} {'columns' if dim else 'rows'} of {match.name}.{leaf}"
            return Problem(key=_SIZE_KEY, value=degree, rule=f"does not divide {dim_text}, which {style.name} cuts.")
    owner, _, leaf = match.name.rpartition(".")
    units = getattr(model.get_submodule(owner), "tensor_units", {}).get(leaf)
    if dims and units is not None and units[0] % degree:
        rule = f"does not divide the {units[0]} {units[1]} of {match.name}, which are not cut apart."
        return Problem(key=_SIZE_KEY, value=degree, rule=rule)
    return None


def _uncuttable(match: MatchedModule, model: nn.Module) -> str | None:
    owner = model.get_submodule(match.name.rpartition(".")[0])
    if isinstance(owner, nn.MultiheadAttention):
        return f"{match.name} is part of an nn.MultiheadAttention, which reads its weight itself: it cannot be sharded."
    weight = getattr(match.module, "weight", None)
    if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter):
        return f"{match.name} computes its weight from other parameters, as weight_norm does: it cannot be sharded."
    if isinstance(match.module, nn.Embedding) and (match.module.sparse or match.module.max_norm is not None):
        return f"{match.name} has sparse gradients or a largest norm, which need whole rows: it cannot be sharded."
    return None


def _dims(model: nn.Module, chosen: Sequence[MatchedModule]) -> tuple[dict[str, int], list[Problem]]:
    """Return the sharded dim of each parameter, and problems for tied ones that are sharded differently."""
    match_of = {id(match.module): match for match in chosen}
    uses_of: dict[int, list[tuple[str, int | None, MatchedModule | None]]] = {}
    for name, module in model.named_modules():
        match = match_of.get(id(module))
        dims = (match.style.dims(module) or {}) if match else {}
        for leaf, parameter in module.named_parameters(recurse=False):
            uses_of.setdefault(id(parameter), []).append((f"{name}.{leaf}", dims.get(leaf), match))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dim_of = {names[key]: uses[0][1] for key, uses in uses_of.items()}
    tied = [_tied_problem(uses) for uses in uses_of.values() if len({dim for _, dim, _ in uses}) > 1]
    return {name: dim for name, dim in dim_of.items() if dim is not None}, tied


def _tied_problem(uses: Sequence[tuple[str, int | None, MatchedModule | None]]) -> Problem:
    name, dim, match = next((name, dim, match) for name, dim, match in uses if dim is not None and match is not None)
    other, other_dim, _ = next(use for use in uses if use[1] != dim)
    is_cut = "is not sharded" if other_dim is None else f"is sharded by {'columns' if other_dim else 'rows'}"
    rule = f"{name} and {other} are one parameter (tied), and {other} {is_cut}. Shard both in the same way, or neither."
    return Problem(key=f"{_KEY}.{match.pattern}", value=match.style.name, rule=rule)
