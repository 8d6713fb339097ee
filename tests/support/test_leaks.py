"""A process, thread or setting that a test leaves behind, unseen by all tests, is caught here alone."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.leaks import look, settled_leaks


def test_a_variable_a_thread_and_a_child_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = look()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="left-behind")
    thread.start()
    child = subprocess.Popen(["sleep", "60"])
    while not Path(f"/proc/{child.pid}/cmdline").read_bytes():  # between fork and exec it has no command
        time.sleep(0.001)
    monkeypatch.setenv("LEFT_BEHIND", "1")

    leaks = settled_leaks(before, patience_s=0)

    ended.set()
    thread.join()
    child.kill()
    child.wait()
    assert leaks == ["environment: {'LEFT_BEHIND': '1'}", f"children: {child.pid} (sleep 60)", "threads: left-behind"]


def test_a_changed_folder_and_torch_setting_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    before = look()
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    leaks = settled_leaks(before, patience_s=0)
    torch.set_default_dtype(torch.float32)
    assert leaks == [f"folder: {tmp_path}", "torch_settings: {'default dtype': 'torch.float64'}"]
