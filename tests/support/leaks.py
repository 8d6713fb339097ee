"""What a test may leave behind: nothing. Each look at the process is cheap enough to take around every test."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# pytest rewrites it around every phase; the rest are set once, at import, by libraries that the first test imports
IGNORED_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # set where inductor is imported
        "TRITON_CACHE_DIR",  # set where inductor compiles the first kernel for a GPU, with the next two
        "TRITON_PTXAS_PATH",
        "TRITON_LIBDEVICE_PATH",
    }
)

# in the command lines of what lives for the session
_LASTING = (b"tests.support.pool_worker", b"tests.support.quick", b"tests/support/quick.py", b"resource_tracker")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one look at this process sees."""

    environment: Mapping[str, str]
    folder: str
    children: frozenset[int]
    threads: frozenset[int]
    process_group: bool
    hydra: bool
    torch_settings: Mapping[str, Any]

    def leaks_since(self, before: Footprint) -> list[str]:
        """What is here now and was not before, one sentence each."""
        leaks = []
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(self, field.name)
            if isinstance(new, frozenset):
                new, old = new - old, frozenset()
            if field.name == "torch_settings" and not old:
                continue  # this test was the first to import torch
            if isinstance(new, Mapping):
                changed = {key: new.get(key) for key in new.keys() | old.keys() if new.get(key) != old.get(key)}
                new, old = changed, {}
            if new != old:
                leaks.append(f"{field.name}: {_shown(field.name, new)}")
        return leaks


def look() -> Footprint:
    """The footprint of this process; imports nothing that is not imported already."""
    return Footprint(
        environment={name: text for name, text in os.environ.items() if name not in IGNORED_VARIABLES},
        folder=str(Path.cwd()),
        children=frozenset(child_pids()),
        threads=frozenset(t.ident or 0 for t in threading.enumerate() if not _lives_on(t)),
        process_group=_process_group(),
        hydra=_hydra(),
        torch_settings=_torch_settings(),
    )


def settled_leaks(before: Footprint, *, patience_s: float) -> list[str]:
    """The leaks that are still there after a moment: threads and children need one to end."""
    deadline = time.monotonic() + patience_s
    while (leaks := look().leaks_since(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return leaks


def child_pids() -> set[int]:
    """Living children of this process, of all its threads (Linux; empty elsewhere)."""
    pids: set[int] = set()
    for thread in _threads_of_the_system():
        try:
            with open(f"/proc/self/task/{thread}/children", "rb") as file:  # noqa: PTH123 - twice in each test
                pids.update(map(int, file.read().split()))
        except OSError:  # the thread ended meanwhile
            continue
    return {pid for pid in pids if not _expected(pid)}


def _threads_of_the_system() -> list[str]:
    try:
        return os.listdir("/proc/self/task")  # noqa: PTH208 - twice in each test
    except OSError:
        return []


def _expected(pid: int) -> bool:
    """True for what lives for the session: a worker of the pool, the quick command, Python's resource tracker."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return any(name in command for name in _LASTING)


def _lives_on(thread: threading.Thread) -> bool:
    """Threads that libraries start once and keep: no test can end them."""
    prefixes = ("pytest_timeout", "QueueFeederThread", "tqdm_monitor")
    return thread is threading.main_thread() or thread.name.startswith(prefixes) or thread in _compiling_threads()


def _compiling_threads() -> set[threading.Thread]:
    """The pool in which inductor compiles several kernels at once, if it has begun."""
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return set()
    return set(module.AsyncCompile.pool()._threads)


def _process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def _hydra() -> bool:
    module = sys.modules.get("hydra.core.global_hydra")
    return bool(module and module.GlobalHydra.instance().is_initialized())


def _torch_settings() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns, once, that the precision has other settings, too
        precision = torch.get_float32_matmul_precision()
    return {
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "float32 matmul precision": precision,
    }


def _shown(name: str, value: Any) -> str:
    if name == "threads":
        return ", ".join(sorted(t.name for t in threading.enumerate() if t.ident in value))
    if name == "children":
        return ", ".join(f"{pid} ({_command(pid)})" for pid in sorted(value))
    return str(value)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "gone"
