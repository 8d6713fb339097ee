"""Read a docstring's part `Example:` as code: an extension of griffe, which knows `Examples:` alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the part."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ARG002 - the extension's interface
        """Rename the part in the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
