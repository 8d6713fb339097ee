"""A class of a notebook cell that the replicas cannot import is caught here alone: the page is run as a notebook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "in-a-notebook.md"


@pytest.mark.engine
def test_the_page_runs_as_a_notebook_on_one_and_two_replicas(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    cells = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.outputs]
    assert any("data:image/png;base64," in data.get("text/html", "") for data in shown)
    assert "val/accuracy" in shown[-1]["text/plain"]
    assert len(list(tmp_path.glob("outputs/*/*/code/notebook_*.py"))) == 1
