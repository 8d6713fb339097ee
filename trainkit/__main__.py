"""The entry point of `python -m trainkit` and of the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from trainkit.cli import main as run  # noqa: PLC0415 - a spawned child imports this module and needs none of it

    code = run()
    if "trainkit.run.rendezvous.join" in sys.modules:  # this process was one of several ranks
        from trainkit.run.signals import exit_without_teardown  # noqa: PLC0415 - only for a rank

        exit_without_teardown(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
