"""`trainkit explain KEY OVERRIDES`: print a key's value, its origin, type, unit, default, meaning and effect.

`trainkit explain errors.SECTION`: cause and remedy of a kind of error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainkit.config.check import NEEDS_VALUE, check_names_first
from trainkit.config.check.recipe_keys import fitted
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, KeyPath, dotted, lookup
from trainkit.config.described.key_facts import facts_of
from trainkit.config.grammar import refusal
from trainkit.config.secrets import redacted, secret_keys
from trainkit.config.targets.choices import REQUIRED
from trainkit.config.values import leaves, nearest
from trainkit.errors import refuse, yaml_text
from trainkit.fields import Tag
from trainkit.redaction import REDACTED
from trainkit.report.error_address import PREFIX, section, sections
from trainkit.report.schemas.looking import ExplainedKey, Explanation
from trainkit.verbs.support.call import Call

_MEANINGS: Final = {
    Tag.maths: "maths: changes the result",
    Tag.placement: "placement: where it runs; the result is the same, up to rounding",
    Tag.speed: "speed: how fast it runs; the result is the same",
    Tag.cosmetic: "cosmetic: output and stored files; the result is the same",
}


def run(call: Call) -> int:
    """Print the explanation."""
    if call.arguments and all(word.partition(".")[0] == "errors" for word in call.arguments):
        return _explain_errors(call)
    call.check_arity(1, 1)
    composed = compose(call.overrides, config_dirs=call.config_dirs, packages=call.packages)
    composition, problems = fitted(composed, check_names_first)
    # A key without a value may be the one to explain.
    refuse([problem for problem in problems if not problem.rule.startswith(NEEDS_VALUE)])
    document = explanation(composition, call.arguments[0])
    call.show(document, _lines(document, isinstance(_value(composition, document["key"]), Mapping)))
    return 0


def _explain_errors(call: Call) -> int:
    """Print sections of the page of errors, or the names of all."""
    call.check_arity(most=len(call.arguments), overrides=False)
    if "json" in call.flags:
        raise refusal("--json", "is for keys: a section is text.")
    if call.arguments == (PREFIX,):
        texts = [f"{PREFIX}.{name}" for name in sections()]
    else:
        texts = [f"{section(word.partition('.')[2])}\n" for word in call.arguments]
    sys.stdout.write("\n".join([*texts, ""]).rstrip("\n") + "\n")
    return 0


def explanation(composition: Composition, key: str) -> Explanation:
    """Return the explanation of a key, and of every key below it.

    Raises:
        ConfigError: there is no such key, or the composition has problems.
    """
    path = tuple(key.split("."))
    keys = [dotted(inner) for inner, _ in leaves(composition.values)]
    if not any(name == key or name.startswith(f"{key}.") for name in keys):
        hint = nearest(key, [*keys, *composition.values], shown=composition.values)
        raise refusal(key, f"no such key in this composition. {hint}")
    value = _value(composition, key)
    inner = [(*path, *below) for below, _ in leaves(value)] if isinstance(value, Mapping) else []
    return {
        "version": 1,
        "key": key,
        "choice": composition.choices.get(key),
        "meaning": facts_of(composition, path).meaning,
        "keys": [_explained(composition, leaf) for leaf in inner or [path]],
        "notes": [note for note in composition.notes if path[0] in note],
    }


def _explained(composition: Composition, path: KeyPath) -> ExplainedKey:
    facts, key = facts_of(composition, path), dotted(path)
    required = facts.default == REQUIRED
    secret = any(path[:length] in secret_keys(composition.values) for length in range(1, len(path) + 1))
    return {
        "key": key,
        "value": _value(composition, key),
        "set_by": composition.origin(path).where,
        "type": facts.type,
        "unit": facts.unit,
        "default": None if required else REDACTED if secret and facts.default is not None else facts.default,
        "required": required,
        "meaning": facts.meaning,
        "tag": facts.tag.value,
    }


def _value(composition: Composition, key: str) -> Any:
    """Return the value of a key; secrets and parts of secrets are redacted."""
    path = tuple(key.split("."))
    value = lookup(redacted(composition.values), path)
    hidden = any(path[:length] in secret_keys(composition.values) for length in range(1, len(path)))
    return REDACTED if hidden else value


def _lines(document: Explanation, is_group: bool) -> Iterator[str]:
    key, choice, keys = document["key"], document["choice"], document["keys"]
    if choice is not None:
        yield f"{key}={'[' + ','.join(choice) + ']' if isinstance(choice, list) else choice}"
    if is_group:
        shown = [entry for entry in keys if entry["key"] != key]  # an empty group is a key without keys
        width = max((len(entry["key"]) for entry in shown), default=0)
        for entry in shown:
            yield f"  {entry['key']:<{width}}  {yaml_text(entry['value']):<12}  {entry['set_by']}".rstrip()
    else:
        yield from _facts(keys[0])
    if document["meaning"]:
        yield f"  means    {document['meaning']}"
    if not is_group:
        yield f"  changes  {_MEANINGS[Tag(keys[0]['tag'])]}"
    yield from (f"  note     {note}" for note in document["notes"])


def _facts(entry: ExplainedKey) -> Iterator[str]:
    yield f"{entry['key']}={yaml_text(entry['value'])}"
    yield f"  set by   {entry['set_by'] or 'nothing: the default'}"
    yield f"  type     {entry['type']}"
    yield f"  unit     {entry['unit']}"
    yield f"  default  {'none: it must be given' if entry['required'] else yaml_text(entry['default'])}"
