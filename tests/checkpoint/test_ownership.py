"""A save, a pruning or a fallback that deletes a file of the user or of another run is caught here alone."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.present import present
from tests.support.saving import save
from trainkit.errors import UnreadableError
from trainkit.trainer.checkpoint.tensors import load, newest_valid, note_foreign
from trainkit.trainer.manifest import Retention, list_complete
from trainkit.trainer.ownership import MARK, OwnershipToken


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The `checkpoints` folder of a run with a token."""
    run = tmp_path / "run"
    run.mkdir()
    OwnershipToken().mark(run)
    (run / "checkpoints").mkdir()
    return run / "checkpoints"


def put(root: Path, step: int, *, keep: int | None = None, owner: OwnershipToken | None = None) -> None:
    tensors, retention = {"param/w": torch.full((4,), float(step))}, Retention(keep_last=keep)
    save(root, step=step, tensors=tensors, meta={"position": step}, retention=retention, owner=owner)


def steps(root: Path) -> list[int]:
    return [entry.step for entry in list_complete(root)]


def plant(root: Path) -> dict[str, bytes]:
    """Put what the run did not write between its checkpoints; returns the content of every file."""
    users = root.parent.parent / "users"
    (users / "deep").mkdir(parents=True)
    (users / "deep" / "thesis.tex").write_text("users")
    for name in ("step_00000098", "step_backup", ".tmp_x", ".tmp_step_00000007", "best", "last", "step_1", ".git"):
        (root / name).mkdir()
        (root / name / "notes.txt").write_text(name)
    for name in ("step_00000097", "index.json.bak", ".hidden", ".tmp_file", "step_00000098 (copy)", "Läufe-記録"):
        (root / name).write_text(name)
    (root / "step_00000096").symlink_to(users)
    (root / ".tmp_link").symlink_to(users)
    for step in (99, 999):
        put(root, step, owner=OwnershipToken())
    OwnershipToken().make(root / ".tmp_step_00000005")
    (root / "index.json").unlink()
    return held(root)


def held(root: Path) -> dict[str, bytes]:
    """Every file below a folder and behind its links."""
    paths = [Path(folder) / name for folder, _, names in os.walk(root, followlinks=True) for name in names]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_saves_resumes_and_retention_leave_alone_what_the_run_did_not_write(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here
    planted, said = plant(root), list[str]()
    for step in (*range(1, 10), *range(90, 105)):
        put(root, step, keep=2)
        assert present(newest_valid(root, said.append)).checkpoint.step == step
    found = {name.replace(".aside", ""): content for name, content in held(root).items()}
    assert planted == {name: found[name] for name in planted}
    assert steps(root) == [104, 103]
    taken = [f"step_000000{number}.aside" for number in (96, 97, 98, 99)]
    assert sorted(path.name for path in root.glob("*.aside")) == taken
    (root / "step_00000096.aside" / "deep").rename(root / "still_a_link")


def test_a_path_in_the_place_of_a_checkpoint_is_renamed_and_both_names_are_shown(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step_00000007").write_text("a file")
    put(root, 7)
    assert f"renamed to {root}/step_00000007.aside." in capsys.readouterr().err
    assert (root / "step_00000007.aside").read_text() == "a file"


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        put(root, step)
    with monkeypatch.context() as patched:
        refuse_reading(patched, root / "step_00000003")
        fallen_back = newest_valid(root, lambda _: None)
    assert present(fallen_back).checkpoint.step == 2
    put(root, 2, keep=1)
    assert load(root / "step_00000003.aside").tensors["param/w"].eq(3.0).all()
    assert "step_00000003 was skipped, and the run has continued to step 2 from an older" in capsys.readouterr().err


def refuse_reading(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Let every look at a file below a folder fail."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(folder)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *args, **kwargs)

        return call

    for name in ("open", "stat", "lstat", "scandir"):
        patched.setattr(os, name, refusing(getattr(os, name)))
    patched.setattr(Path, "open", refusing(Path.open))


def test_while_a_checkpoint_cannot_be_read_it_stays_where_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        put(root, step)
    with monkeypatch.context() as patched:
        refuse_reading(patched, root / "step_00000003")
        put(root, 2, keep=1)
    assert load(root / "step_00000003").checkpoint.step == 3


def test_a_file_of_the_users_in_a_checkpoint_outlives_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, 1)
    (root / "step_00000001" / "notes.txt").write_text("mine")
    put(root, 2, keep=1)
    assert [path.name for path in (root / "step_00000001.aside").iterdir()] == ["notes.txt"]
    assert "files of step_00000001 that this run did not write" in capsys.readouterr().err


def test_what_a_kill_leaves_of_this_run_is_deleted_by_the_next_save(root: Path) -> None:
    for draft in (".tmp_step_00000001", ".tmp_old_step_00000002"):
        present(OwnershipToken.found(root.parent)).make(root / draft)
        (root / draft / "rank_00000.safetensors").write_text("half")
    put(root, 3)
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "step_00000003"]


def test_a_run_that_has_saved_nothing_starts_beside_a_folder_of_the_users(root: Path) -> None:
    (root / "step_00000099").mkdir()
    said: list[str] = []
    assert newest_valid(root, said.append) is None
    assert "step_00000099 is not a complete checkpoint" in said[0]
    assert (root / "step_00000099").exists()


def test_a_newer_checkpoint_of_another_run_is_named_and_not_used(root: Path) -> None:
    put(root, 1)
    put(root, 99, owner=OwnershipToken())
    said: list[str] = []
    assert present(newest_valid(root, said.append)).checkpoint.step == 1
    note_foreign(root, 1, said.append)
    assert "step_00000099 was not written by this run" in said[0]
    assert f"resume={root}/step_00000099" in said[0]


def test_a_link_to_a_folder_of_this_run_is_not_followed(root: Path, tmp_path: Path) -> None:
    present(OwnershipToken.found(root.parent)).make(tmp_path / "moved")
    (root / ".tmp_step_00000009").symlink_to(tmp_path / "moved")
    put(root, 1)
    assert (tmp_path / "moved" / MARK).exists()


def test_a_token_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"token": "x"}')
    with pytest.raises(UnreadableError, match="it holds no token of a run"):
        OwnershipToken.read(tmp_path)
