"""Numbers and paths as a user or a launcher writes them: arguments, flags and environment variables."""

from __future__ import annotations


def whole_number(text: str, *, low: int, high: int) -> int | None:
    """Return the number that a text writes in plain digits; None for any other text, or a number outside of the limits.

    Example:
        >>> whole_number("12", low=1, high=100), whole_number("1e3", low=1, high=10_000)
        (12, None)
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return None
    number = int(text)
    return number if low <= number <= high else None


def path_rule(path: str) -> str | None:
    """Return why no file system of Linux accepts a path; None if it does.

    Example:
        >>> path_rule("runs/" + "x" * 300), path_rule("runs/1")
        ('has a name of 300 bytes; a file system takes 255 at most.', None)
    """
    sizes = [len(part.encode(errors="surrogateescape")) for part in path.split("/")]
    if "\0" in path:
        return "holds a null character, which no path may hold."
    if max(sizes) > 255:
        return f"has a name of {max(sizes):,} bytes; a file system takes 255 at most."
    return (
        f"has {sum(sizes) + len(sizes) - 1:,} bytes; a path may have 4,095." if sum(sizes) + len(sizes) > 4096 else None
    )
