"""What a call refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import ConfigError


def refused(call: Callable[..., object], *given: Any, **keys: Any) -> list[str]:
    """Return the problems of a call that must be refused, as the user reads them."""
    with pytest.raises(ConfigError) as caught:
        call(*given, **keys)
    return [str(problem) for problem in caught.value.problems]
