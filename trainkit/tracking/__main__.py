"""`python -m trainkit.tracking RUN`: send the unsent rows and files of a run to its trackers."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.errors import UnreadableError
from trainkit.tracking.sending import send_later

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trainkit.tracking RUN")
    try:
        sys.exit(send_later(Path(sys.argv[1]).expanduser()))
    except UnreadableError as error:
        sys.exit(str(error))
