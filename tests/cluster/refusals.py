"""How a test reads what was refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import ConfigError


def refused(call: Callable[[], Any]) -> list[str]:
    """The problems of a call that must be refused, as the user reads them."""
    with pytest.raises(ConfigError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]
