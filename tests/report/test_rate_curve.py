"""The learning rate of a plan: bars in the terminal, and a picture."""

from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.report.rate_curve import bars


def test_bars_are_heights_from_zero_to_the_largest() -> None:
    assert bars([0.0, 1.0, 3.0, 7.0], encoding="UTF-8") == "▁▂▄█"
    assert bars([0.0, 7.0], encoding="latin-1") == "_@"
    assert bars([0.0, 0.0], encoding=None) == "__"


def test_plan_shows_the_curve_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rates.png"
    assert main(["plan", "recipe=digits", "--rate-png", str(picture)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  rate   ")]
    shown = line.split()[1]
    assert len(shown) == 60
    assert shown[0] == shown[-1] != shown[2]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_another_format_than_png_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=digits", "--rate-png", "rates.pdf"]) == 2
    assert "  --rate-png=rates.pdf: must end in .png. (command line)\n" in capsys.readouterr().err
