"""Write the JSON document of a verb to standard output."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document, indented; numbers that JSON lacks (NaN, infinity) become null.

    Example:
        >>> print_json({"version": 1, "loss": float("nan")})
        {
          "version": 1,
          "loss": null
        }
    """
    sys.stdout.write(f"{json.dumps(_finite(document), indent=2, ensure_ascii=False)}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
