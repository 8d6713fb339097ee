"""The names, sizes and imports of the code keep the rules of the house (docs/decisions/0026-rooms.md)."""

from scripts import words


def test_no_old_name_is_left() -> None:
    assert [*words.found_names(words.NAMES), *words.found_modules()] == []
