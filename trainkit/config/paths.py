"""Paths of trainkit's own YAMLs: inside the package once installed, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_conf", "shipped_recipes"]


def shipped_conf() -> Path:
    """Return the folder of trainkit's own YAMLs."""
    return _shipped("conf")


def shipped_recipes() -> Path:
    """Return the folder of trainkit's recipes."""
    return _shipped("recipes")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    return next((folder for folder in (package / name, package.parent / name) if folder.is_dir()), package / name)
