"""Count the files of trainkit/ in which a run calls a function, up to its first reduced gradient, or in one step.

python scripts/hops.py [--by-process]
python scripts/hops.py --step one_device
python scripts/hops.py --step mirrored

The run is `strategy=mirrored strategy.replicas=2` with the default recipe; its parent and its rank 0 count. Code of a
module or of a class body, which an import runs, does not. With `--step`, it is a step of rank 0 at which
nothing else is due, without callbacks: see docs/all-of-trainkit.md#a-step.
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

STEP_HOOK: Final = """
import json, os, sys, threading
OUT, PACKAGE = os.environ["HOPS_OUT"], os.environ["HOPS_PACKAGE"]
STEPS = [set()]

def seen(frame, event, _):
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return
    if event == "call" and code.co_flags & 1 and code.co_name[0] != "<":
        STEPS[-1].add(code.co_filename)
    elif event == "return" and code.co_name == "complete" and code.co_filename.endswith("/trainer/loop.py"):
        STEPS.append(set())
        if len(STEPS) == 11 and os.environ.get("TRAINKIT_RANK", "0") == "0":
            sys.setprofile(None)
            with open(os.path.join(OUT, "step"), "w") as file:
                json.dump(sorted(min(STEPS[3:10], key=len)), file)

threading.setprofile(seen)
sys.setprofile(seen)
"""
STRATEGIES: Final = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
}


def traced_step(strategy: str) -> list[str]:
    """Run a training of some steps; return the files of one of them, relative to trainkit/."""
    with tempfile.TemporaryDirectory() as folder:
        run = [*STRATEGIES[strategy], "callbacks=[]", "logger=[]", "report_page=false", "stop_at_step=12"]
        _run(folder, STEP_HOOK, *run)
        files = json.loads(Path(folder, "step").read_text())
    return [file.removeprefix(f"{ROOT}/trainkit/") for file in files]


def _run(folder: str, hook: str, *arguments: str, **variables: str) -> None:
    Path(folder, "sitecustomize.py").write_text(hook)
    paths = os.pathsep.join([folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    hooked = {"HOPS_OUT": folder, "HOPS_PACKAGE": str(ROOT / "trainkit"), "PYTHONPATH": paths, **variables}
    command = [sys.executable, "-m", "trainkit", *arguments, f"hydra.run.dir={folder}/run"]
    subprocess.run(command, env={**os.environ, **hooked}, check=True, capture_output=True)


def traced() -> dict[str, set[str]]:
    """Run the training; return the files of its parent and of its rank 0, relative to trainkit/."""
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, HOOK, "strategy=mirrored", "strategy.replicas=2", "stop_at_step=2", HOPS_PARENT="1")
        rank0, parent = (json.loads(Path(folder, name).read_text()) for name in ("rank0", "parent"))
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
    parser.add_argument("--step", choices=STRATEGIES, help="the files of one step of a strategy")
    options = parser.parse_args()
    if options.step:
        files = traced_step(options.step)
        print(*files, f"{len(files)} files", sep="\n")
        return 0
    by_process = options.by_process
    files_of = traced()
    files = sorted(set().union(*files_of.values()))
    for file in files:
        callers = ", ".join(name for name in files_of if file in files_of[name])
        print(f"{file:<60} {callers}".rstrip() if by_process else file)
    sizes = ", ".join(f"{len(names)} in {name}" for name, names in files_of.items())
    print(f"{len(files)} files ({sizes}); at most {MOST} are wanted")
    return int(len(files) > MOST)


if __name__ == "__main__":
    sys.exit(main())
