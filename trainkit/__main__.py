"""`python -m trainkit`, and the console script."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from trainkit.cli import main as run  # noqa: PLC0415 - a spawned child imports this module and needs none of it

    code = run()
    if "trainkit.run.joining" in sys.modules:  # it was one of several ranks
        from trainkit.run.ending import end_process  # noqa: PLC0415 - for those

        end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
