"""A value that may be None, where a test knows that it is not."""

from typing import TypeVar

_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """Return the value; fail the test where it is None."""
    assert value is not None
    return value
