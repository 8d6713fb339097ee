"""Each module of benchmarks can be imported, and each script knows its options."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

PATHS = sorted({*ROOT.glob("benchmarks/**/[a-z]*.py")} - {ROOT / "benchmarks/pair_keras.py"})  # needs Keras


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_benchmark_is_imported_and_prints_its_options(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # scripts set the number of threads there
    monkeypatch.setattr(sys, "path", [*sys.path])
    if path.stem == "pages":
        pytest.importorskip("playwright")
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if hasattr(module, "argparse"):
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert (ended.value.code, "usage: " in capsys.readouterr().out) == (0, True)
