"""The other choices of a group: their names, and which of them has a given key."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.config.composition import Composition, ConfigFile
from trainkit.config.paths import shipped_conf
from trainkit.config.provenance import KeyPath, dotted
from trainkit.config.values import closest
from trainkit.config.yaml_documents import Document, read_document
from trainkit.errors import ConfigError, Problem

__all__ = ["OtherChoices"]


class OtherChoices:
    """Reads the other choices of a group, only when a message needs them."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self._documents: dict[str, dict[str, Document]] = {}

    def choices(self, group: str) -> list[str]:
        """Return the names of a group's choices."""
        return sorted(self.documents(group))

    def documents(self, group: str) -> dict[str, Document]:
        """Return choice -> its file, without broken files: the composition does not use them."""
        if group not in self._documents:
            found: dict[str, Document] = {}
            for folder in (*self._composition.config_dirs, shipped_conf()):
                for file in sorted((folder / group).glob("*.yaml")):
                    if file.stem in found:
                        continue
                    try:
                        found[file.stem] = read_document(file)
                    except ConfigError:
                        continue
            self._documents[group] = found
        return self._documents[group]

    def takes_more(self, file: ConfigFile) -> bool:
        """Return whether the file of a choice declares that its class takes further keys: `# @takes more`."""
        text = file.document.file.read_text(encoding="utf-8") if file.document.file.is_file() else ""
        return "# @takes more" in text

    def unknown(self, path: KeyPath, name: str, choice: str, known: Iterable[str]) -> Problem:
        """Return the problem of an unknown key, with the choices that have this key or the closest known key."""
        group = path[0]
        rule = f"no such key in {choice}."
        owners = [other for other, document in self.documents(group).items() if name in document.values]
        near = closest(name, [key for key in known if not key.startswith("_")])
        if owners and near is None and len(path) == 1:
            rule += (
                f" It belongs to {', '.join(owners)}: add {group}={owners[0] if len(owners) == 1 else 'ONE OF THEM'}."
            )
        elif near is not None:
            rule += f" Did you mean {dotted((*path, near))}?"
        else:
            keys = [key for key in known if not key.startswith("_")]
            rule += f" There are: {', '.join(keys)}." if keys else " It has none."
        return self._composition.problem((*path, name), rule, show_value=False)
