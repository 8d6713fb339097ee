"""Count the files of trainkit/ in which a run calls a function, up to its first reduced gradient.

python scripts/hops.py [--by-process]

The run is `strategy=mirrored strategy.replicas=2` with the default recipe; its parent and its rank 0 count. Code of a
module or of a class body, which an import runs, does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST: Final = 90

HOOK: Final = """
import atexit, json, os, sys, threading, time
OUT, PACKAGE = os.environ["HOPS_OUT"], os.environ["HOPS_PACKAGE"]
FIRST = {}
IS_FUNCTION = 1  # CO_OPTIMIZED: neither a module nor the body of a class
BESIDE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}

def write(name):
    with open(os.path.join(OUT, name), "w") as file:
        json.dump({"now": time.time(), "first": FIRST}, file)

def seen(frame, event, _):
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return
    if event == "call" and code.co_flags & IS_FUNCTION and code.co_name not in BESIDE:
        FIRST.setdefault(code.co_filename, time.time())
    elif event == "return" and code.co_name == "finish" and "/strategies/reducers/" in code.co_filename:
        sys.setprofile(None)
        threading.setprofile(None)
        if os.environ.get("TRAINKIT_RANK") == "0":
            write("rank0")

os.register_at_fork(after_in_child=FIRST.clear)
if os.environ.pop("HOPS_PARENT", None):
    atexit.register(write, "parent")
threading.setprofile(seen)
sys.setprofile(seen)
"""


def traced() -> dict[str, set[str]]:
    """Run the training; return the files of its parent and of its rank 0, relative to trainkit/."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(HOOK)
        variables = {"HOPS_OUT": place, "HOPS_PACKAGE": str(ROOT / "trainkit"), "HOPS_PARENT": "1"}
        paths = os.pathsep.join([place, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        run = ["strategy=mirrored", "strategy.replicas=2", "stop_at_step=2", f"hydra.run.dir={place}/run"]
        command = [sys.executable, "-m", "trainkit", *run]
        subprocess.run(command, env={**os.environ, **variables, "PYTHONPATH": paths}, check=True, capture_output=True)
        rank0, parent = (json.loads(Path(place, name).read_text()) for name in ("rank0", "parent"))
    before = {file for file, moment in parent["first"].items() if moment <= rank0["now"]}
    prefix = f"{ROOT}/trainkit/"
    return {
        name: {file.removeprefix(prefix) for file in files}
        for name, files in (("parent", before), ("rank 0", {*rank0["first"]}))
    }


def main() -> int:
    """Print the files and their number; return 1 where there are too many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by-process", action="store_true", help="show which process calls each file")
    by_process = parser.parse_args().by_process
    found = traced()
    files = sorted(set().union(*found.values()))
    for file in files:
        callers = ", ".join(name for name in found if file in found[name])
        print(f"{file:<60} {callers}".rstrip() if by_process else file)
    sizes = ", ".join(f"{len(names)} in {name}" for name, names in found.items())
    print(f"{len(files)} files ({sizes}); at most {MOST} are wanted")
    return int(len(files) > MOST)


if __name__ == "__main__":
    sys.exit(main())
