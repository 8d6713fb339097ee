"""The packages that the extras of trainkit install.

The name `trainkit` on the public package index is another project's: no message must recommend to install it from
there. The distribution is named `trainkit-torch`, the package `trainkit`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "trainkit-torch"
_PROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"
"""The project file of a checkout; an installed wheel has its metadata instead."""


def install_command(extra: str, package: str) -> str:
    """Return the command that installs an optional dependency.

    Args:
        extra: the extra of trainkit that it belongs to.
        package: the package to install if there is no such extra.

    Example:
        >>> install_command("slurm", "submitit")
        'pip install "submitit>=1.5"'
    """
    return " ".join(["pip install", *(f'"{name}"' for name in packages_of(extra) or (package,))])


def packages_of(extra: str) -> tuple[str, ...]:
    """Return the requirements of an extra, as pyproject.toml or the metadata of the installed package lists them.

    Example:
        >>> packages_of("slurm"), packages_of("no such extra")
        (('submitit>=1.5',), ())
    """
    if _PROJECT.is_file():
        import tomllib  # noqa: PLC0415 - for error messages, and every command imports this module

        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            return tuple(project["optional-dependencies"].get(extra, ()))
    import importlib.metadata  # noqa: PLC0415 - as above

    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    split = (text.partition(";") for text in requirements)
    return tuple(name.strip() for name, _, condition in split if marker.search(condition))
