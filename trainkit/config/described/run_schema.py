"""JSON schema of a config file: a recipe, an experiment, conf/config.yaml, or the YAML of a choice.

Editors read it to complete keys and to flag mistakes. It is built from the annotations, the documentation and the YAML
files that the checks of a run read, so it accepts the same configs. A file may hold a part of a config: nothing is
required in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trainkit.config.annotations import DRAFT, Schema, schema_of
from trainkit.config.composition import Composition
from trainkit.config.described.key_facts import (
    GROUP_KEY_DOCS,
    NO_UNIT,
    default_of,
    type_text,
    unit_of,
)
from trainkit.config.docstrings import doc_line, doc_lines, summary
from trainkit.config.identity import tag_of
from trainkit.config.optimizers import OWN_KEYS
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import GROUP_KEYS, INJECTED, signature_of, target_of
from trainkit.config.targets.checks import OtherChoices
from trainkit.config.targets.choices import REQUIRED
from trainkit.config.targets.kinds import PLACES
from trainkit.config.values import plain
from trainkit.config.yaml_files import Document, read_document, shipped_conf, shipped_recipes
from trainkit.errors import yaml_text
from trainkit.fields import tag_in

VERSION: Final = 1
_REFERENCE: Final = r"\$\{.+\}|^\?\?\?$"
"""Text that stands for a value of any type: an interpolation, or the mark of a required key."""
_REFERENCE_REF: Final[Schema] = {"$ref": "#/$defs/reference"}
_FREE: Final[Schema] = {"type": "object"}


def config_schema(config_dirs: Sequence[Path] = ()) -> Schema:
    """Return the schema of config files; imports the class of every choice.

    Args:
        config_dirs: the user's folders of YAMLs, whose choices it then knows too; their packages must be allowed.

    Example:
        >>> schema = config_schema()
        >>> schema["$defs"]["BatchConfig"]["properties"]["global_size"]["default"]
        64
    """
    return _ConfigSchema(config_dirs=tuple(config_dirs)).document()


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """One YAML of a group, and the class that it names."""

    group: str
    name: str
    target: str
    kind: Any
    document: Document

    @property
    def reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self.target}"}


@dataclass(kw_only=True)
class _ConfigSchema:
    config_dirs: tuple[Path, ...]
    sections: Schema = field(default_factory=dict)
    """The dataclasses, each written once."""

    def document(self) -> Schema:
        run = self._run()
        defs = {
            **{choice.target: self._class(choice) for choice in self.choices},
            **{f"node.{group}": self._node(group) for group in GROUPS},
            **{f"keys.{group}": self._any_choice(group) for group in GROUPS},
            "run": run,
            "reference": {"type": "string", "pattern": _REFERENCE, "description": "An interpolation, ${...}."},
            "defaults": self._defaults(),
        }
        sections = {name: _with_references(item) for name, item in self.sections.items() if name not in defs}
        return {
            "$schema": DRAFT,
            "title": "a config of trainkit",
            "description": "A recipe, an experiment or config.yaml; with _target_ at its top, a choice of a group.",
            "version": VERSION,
            "if": {"required": [TARGET]},
            "then": self._choice_file(),
            "else": {"$ref": "#/$defs/run"},
            "$defs": dict(sorted({**defs, **sections}.items())),
        }

    @cached_property
    def alternatives(self) -> OtherChoices:
        return OtherChoices(Composition(values={}, config_dirs=self.config_dirs))

    @cached_property
    def choices(self) -> list[_Choice]:
        choices = []
        for group in GROUPS:
            for name, document in self.alternatives.documents(group).items():
                kind = target_of(document.values, PLACES[group])
                if kind is not None:
                    target = str(document.values[TARGET])
                    choices.append(_Choice(group=group, name=name, target=target, kind=kind, document=document))
        return choices

    def _of_group(self, group: str) -> list[_Choice]:
        return [choice for choice in self.choices if choice.group == group]

    def _run(self) -> Schema:
        """Return the schema of a file whose keys begin at the root."""
        defaults = read_document(shipped_conf() / "config.yaml").values
        properties: Schema = {}
        for name, hint in hints_of(RunConfig).items():
            if name in GROUPS:
                node = {"$ref": f"#/$defs/node.{name}"}
                properties[name] = {"description": doc_line(RunConfig, name), **self._list_of(name, node)}
            elif name == "optimizers":
                properties[name] = {"description": doc_line(RunConfig, name), **_FREE}
                properties[name]["additionalProperties"] = {"$ref": "#/$defs/node.optimizer"}
            elif is_dataclass(plain(hint)):
                self._section(plain(hint), defaults.get(name, {}))
                reference = {"$ref": f"#/$defs/{plain(hint).__name__}"}
                properties[name] = {**reference, "description": doc_line(RunConfig, name)}
            else:
                default = defaults.get(name, default_of(RunConfig, name))
                tag = tag_of(RunConfig(), (name,)).tag.value
                properties[name] = self._key(hint, doc_line(RunConfig, name), default, tag)
        properties["defaults"] = {"$ref": "#/$defs/defaults"}
        properties["hydra"] = {**_FREE, "description": "Hydra's own settings."}
        chosen = [self._selected_by(choice) for choice in self.choices if choice.group not in LIST_GROUPS]
        return {"type": "object", "properties": properties, "additionalProperties": False, "allOf": chosen}

    def _list_of(self, group: str, node: Schema) -> Schema:
        """Return the schema of a group at the root: its node, or with several choices a node for each name."""
        if group not in LIST_GROUPS:
            return node
        properties = {choice.name: self._node_of(choice) for choice in self._of_group(group)}
        return {**_FREE, "properties": properties, "additionalProperties": node}

    def _selected_by(self, choice: _Choice) -> Schema:
        """Return the rule that a file which selects a choice takes the keys of this choice."""
        override = f"override /{choice.group}"
        item = {"type": "object", "required": [override], "properties": {override: {"const": choice.name}}}
        return {
            "if": {"required": ["defaults"], "properties": {"defaults": {"type": "array", "contains": item}}},
            "then": {"properties": {choice.group: self._node_of(choice)}},
        }

    def _node_of(self, choice: _Choice) -> Schema:
        """Return the schema of the node of a choice: the keys of its class, unless the node names another class."""
        other = {"$ref": f"#/$defs/node.{choice.group}"}
        return {"if": {"required": [TARGET]}, "then": other, "else": choice.reference}

    def _node(self, group: str) -> Schema:
        """Return the schema of a node whose choice is not in the file."""
        return {
            "type": "object",
            "properties": {TARGET: self._target_key(group)},
            "allOf": self._by_target(self._of_group(group)),
            "if": {"not": {"required": [TARGET]}},
            "then": {"$ref": f"#/$defs/keys.{group}"},
        }

    def _choice_file(self) -> Schema:
        properties = {TARGET: self._target_key(None), "defaults": {"$ref": "#/$defs/defaults"}}
        return {"type": "object", "properties": properties, "allOf": self._by_target(self.choices)}

    def _by_target(self, choices: Sequence[_Choice]) -> list[Schema]:
        """Return a rule for each class: a node with this class takes only its keys. Other classes take any keys."""
        unique = {choice.target: choice for choice in choices}
        return [
            {"if": {"required": [TARGET], "properties": {TARGET: {"const": name}}}, "then": choice.reference}
            for name, choice in unique.items()
        ] or [{}]

    def _target_key(self, group: str | None) -> Schema:
        names = sorted({choice.target for choice in self.choices if group in (None, choice.group)})
        _, meaning = GROUP_KEY_DOCS[TARGET]
        return {"anyOf": [{"enum": names}, {"type": "string"}], "description": meaning}

    def _any_choice(self, group: str) -> Schema:
        """Return the schema of the keys of any choice of a group."""
        variants: dict[str, list[Schema]] = {}
        classes = [self._class(choice) for choice in self._of_group(group)]
        for schema in classes:
            for name, key in schema["properties"].items():
                if key not in variants.setdefault(name, []):
                    variants[name].append(key)
        merged = {name: keys[0] if len(keys) == 1 else {"anyOf": keys} for name, keys in variants.items()}
        if group == "optimizer":
            merged |= {name: _group_key(name) for name in OWN_KEYS}
        closed = bool(classes) and not any(schema["additionalProperties"] for schema in classes)
        return {"type": "object", "properties": merged, "additionalProperties": not closed}

    def _class(self, choice: _Choice) -> Schema:
        """Return the schema of a node by its class: the parameters, and the keys that the group adds."""
        signature, group, kind = signature_of(choice.kind), choice.group, choice.kind
        size = 1 if group in LIST_GROUPS else 0
        node = {TARGET: choice.target}
        cfg = RunConfig.from_dict({group: {choice.name: node} if size else node})
        docs = doc_lines(kind)
        properties: Schema = {TARGET: {"const": choice.target, "description": GROUP_KEY_DOCS[TARGET][1]}}
        for name, key in signature.keys.items():
            if name in INJECTED.get(group, ()):
                continue
            default = self._shared_default(choice, name, default_of(kind, name))
            tag = tag_of(cfg, (group, *([choice.name] if size else []), name)).tag.value
            inner = plain(key.hint)
            if is_dataclass(inner) and isinstance(inner, type):
                self._section(inner, default if isinstance(default, Mapping) else {})
            properties[name] = self._key(key.hint, docs.get(name, ""), default, tag)
        extra = [name for name in GROUP_KEYS.get(group, ()) if name not in properties]
        properties |= {name: self._groups(properties) if name == "groups" else _group_key(name) for name in extra}
        properties["defaults"] = {"$ref": "#/$defs/defaults"}
        described = choice.document.description or summary(kind)
        more = signature.takes_more
        return {"type": "object", "description": described, "properties": properties, "additionalProperties": more}

    def _shared_default(self, choice: _Choice, name: str, default: Any) -> Any:
        """Return the default that all choices of a class give to a key; `???` where they differ."""
        files = [other.document.values for other in self._of_group(choice.group) if other.target == choice.target]
        values = [file.get(name, default) for file in files]
        return values[0] if all(value == values[0] for value in values) else REQUIRED

    def _groups(self, keys: Mapping[str, Schema]) -> Schema:
        """Return the schema of `groups`: patterns, and the keys of the optimizer that differ."""
        rest = {name: key for name, key in keys.items() if name != TARGET}
        entry = {"type": "object", "properties": {"match": _group_key("match"), **rest}, "additionalProperties": False}
        return {**_group_key("groups"), "additionalProperties": entry}

    def _section(self, kind: Any, defaults: Mapping[str, Any]) -> None:
        """Define a dataclass, with defaults and tags."""
        keys: Schema = {}
        schema = {"type": "object", "description": summary(kind), "properties": keys, "additionalProperties": False}
        for name, hint in hints_of(kind).items():
            default = defaults.get(name, default_of(kind, name))
            keys[name] = self._key(hint, doc_line(kind, name), default, tag_in(hint).tag.value)
        self.sections[kind.__name__] = schema

    def _key(self, hint: Any, meaning: str, default: Any, tag: str) -> Schema:
        """Return the schema of one key: type, limits, documentation, unit, default and tag."""
        typed = schema_of(hint)
        self.sections = {**typed.pop("$defs", {}), **self.sections}
        typed = _or_null(typed) if default is None else typed
        unit = unit_of(hint)
        facts = [tag, *([f"unit: {unit}"] if unit != NO_UNIT else [])]
        shown: Schema = {}
        if default != REQUIRED:
            facts.append(f"default: {yaml_text(default)}")
            shown = {} if default is None else {"default": default}  # editors insert a default as text
        accepted = _with_references(typed)
        if "pattern" in accepted and "pattern" not in typed:
            accepted["patternErrorMessage"] = f"must be {type_text(hint)}."  # editors show it
        return {**accepted, "description": f"{meaning} [{'; '.join(facts)}]".strip(), **shown, "x-tag": tag}

    def _defaults(self) -> Schema:
        """Return the schema of Hydra's defaults list, which knows the choices of each group."""
        names = {group: sorted(self.alternatives.documents(group)) for group in GROUPS}
        names["recipe"] = sorted(folder.name for folder in shipped_recipes().iterdir() if folder.is_dir())
        keys = {
            key: _choice_of(group, choices) for group, choices in names.items() for key in (group, f"override /{group}")
        }
        return {
            "description": "Hydra's defaults list: the choice of each group.",
            "type": "array",
            "items": {"anyOf": [{"const": "_self_"}, {"type": "object", "properties": keys}, {"type": "string"}]},
        }


def _choice_of(group: str, choices: Sequence[str]) -> Schema:
    """Return the schema of the choice of a group; the user may have choices of other names."""
    word: Schema = {"anyOf": [{"enum": list(choices)}, {"type": "string"}]}
    return {
        "anyOf": [
            *word["anyOf"],
            {"type": "null"},
            *([{"type": "array", "items": word}] if group in LIST_GROUPS else []),
        ]
    }


def _group_key(name: str) -> Schema:
    hint, meaning = GROUP_KEY_DOCS[name]
    typed = schema_of(hint)
    return (
        {"anyOf": [typed, {"type": "null"}], "description": meaning}
        if name != "groups"
        else {**_FREE, "description": meaning}
    )


def _or_null(schema: Schema) -> Schema:
    """Return a schema that also accepts null: the checks accept a default of None, even if the annotation does not."""
    if not schema or {"type": "null"} in schema.get("anyOf", ()):
        return schema
    if schema.get("enum") and None not in schema["enum"]:
        return {**schema, "enum": [*schema["enum"], None]}
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if not kinds:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema if "null" in kinds else {**schema, "type": [*kinds, "null"]}


def _with_references(schema: Any) -> Any:
    """Return a schema that also accepts an interpolation in place of each value."""
    if not isinstance(schema, Mapping) or not schema or "$ref" in schema:
        return schema
    inner = {
        key: {name: _with_references(item) for name, item in value.items()}
        if key == "properties"
        else _with_references(value)
        if key in ("items", "additionalProperties")
        else [_with_references(item) for item in value]
        if key == "prefixItems"
        else value
        for key, value in schema.items()
    }
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if "description" in schema or ("string" in kinds and "pattern" not in schema):
        return inner
    if kinds and not {"object", "array", "string"} & set(kinds):
        return {**inner, "type": [*kinds, "string"], "pattern": _REFERENCE}
    return {"anyOf": [inner, _REFERENCE_REF]}
