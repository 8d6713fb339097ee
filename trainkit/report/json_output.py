"""Write the JSON document of a verb to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from trainkit.files import json_value


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document, indented; numbers that JSON lacks (NaN, infinity) become null.

    Example:
        >>> print_json({"version": 1, "loss": float("nan")})
        {
          "version": 1,
          "loss": null
        }
    """
    sys.stdout.write(f"{json.dumps(json_value(document), indent=2, ensure_ascii=False)}\n")
