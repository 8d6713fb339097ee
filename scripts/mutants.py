"""Plant every mutant and run the whole suite against it: `python scripts/mutants.py [NAME ...]`.

Prints which test killed each, and killed / planted at the end; exits with 1 if one survived. Takes minutes per mutant.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mutants.planting import FAILED, copy_sources, mutants, plant, run_tests

# Folders whose tests most likely kill a mutant come first; tests that run mutants or build wheels are left out.
FIRST = ("numerics", "objectives", "engine", "strategies", "contract")
LEFT_OUT = ("mutants", "packaging", "support")


def main(names: list[str]) -> int:
    """Run the suite against each mutant, or those named."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_sources(Path(folder))
        present = [path.name for path in sorted((copy / "tests").iterdir()) if path.is_dir()]
        order = [name for name in FIRST if name in present]
        order += [name for name in present if name not in FIRST + LEFT_OUT and not name.startswith("_")]
        for mutant in chosen:
            with plant(mutant, copy):
                code, output = run_tests(copy, [f"tests/{name}" for name in order], timeout_s=1800)
            killer = next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)), "nothing")
            print(f"{mutant.name}: killed by {killer}" if code == FAILED else f"{mutant.name}: SURVIVED", flush=True)
            if code != FAILED:
                survivors.append(mutant.name)
    print(f"killed {len(chosen) - len(survivors)} of {len(chosen)} planted")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
