"""A run that begins in an existing folder: which files are left, which are renamed, which checkpoints it uses."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from trainkit.cli import main
from trainkit.errors import CheckpointError, ConfigError, StorageError, UnreadableError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.checkpoint import SavePolicy, list_complete, save
from trainkit.trainer.cleanup import delete
from trainkit.trainer.ownership import MARK, OwnershipToken, discard_lock, locked

PACKAGE = Path(__file__).parents[2] / "trainkit"


def put(path: Path, step: int, owner: OwnershipToken | None = None) -> None:
    save(path / "checkpoints", step=step, tensors={"param/w": torch.ones(2)}, meta={}, policy=SavePolicy(owner=owner))


def test_a_first_run_leaves_the_live_and_logs_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("live", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_1").write_text("mine")
    folder = RunFolder(tmp_path)
    for _ in range(3):
        folder.begin()
        folder.open_live()
        folder.heartbeat_of(0).write_text("beat")
    assert [(tmp_path / name / "rank_1").read_text() for name in ("live", "logs")] == ["mine", "mine"]
    assert (folder.live.name, folder.logs.name) == ("live-2", "logs-2")
    assert capsys.readouterr().err == "".join(
        f"{tmp_path}/{name} was not written by this run: it is left where it is, and {tmp_path}/{name}-2 is used.\n"
        for name in ("live", "logs")
    )


def test_a_first_run_renames_the_users_files_that_have_the_names_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["result.json", "metrics.jsonl", "plots/loss.png", "checkpoints/index.json", MARK]
    for name in (*names, "thesis.tex"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    RunFolder(tmp_path).begin()
    assert [(tmp_path / f"{name}.aside").read_text() for name in names] == names
    assert (tmp_path / "thesis.tex").read_text() == "thesis.tex"
    line = f"{tmp_path}/result.json was not written by this run: renamed to {tmp_path}/result.json.aside.\n"
    assert line in capsys.readouterr().err


def test_a_run_that_begins_again_clears_its_own_live_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        folder.begin()
        assert not folder.live.exists()
        folder.open_live()
        (folder.live / "rank_0").touch()
        (folder.live / "rank_1.error.json").touch()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["live"]


def test_a_file_of_the_users_in_the_live_folder_of_a_run_is_set_aside_with_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin()
    folder.open_live()
    (folder.live / "notes.txt").write_text("mine")
    folder.begin()
    assert (tmp_path / "live.aside" / "notes.txt").read_text() == "mine"


def test_a_link_in_the_place_of_live_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.begin()
    owner = OwnershipToken.found(folder.path)
    assert owner is not None
    owner.make(tmp_path / "users")
    (tmp_path / "users" / "rank_0").write_text("mine")
    folder.live.symlink_to(tmp_path / "users")
    folder.begin()
    assert (tmp_path / "users" / "rank_0").read_text() == "mine"


def test_a_run_of_before_tokens_keeps_its_checkpoints_logs_and_result_names(tmp_path: Path) -> None:
    put(tmp_path, 1, OwnershipToken.new())
    strip_token(tmp_path / "checkpoints" / "step_00000001")
    for name in ("live", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "resolved.yaml").touch()
    folder = RunFolder(tmp_path)
    folder.begin()
    assert [entry.step for entry in list_complete(folder.checkpoints)] == [1]
    assert (folder.live.name, folder.logs.name) == ("live-2", "logs")


def strip_token(folder: Path) -> None:
    """Write the manifest as it was before tokens existed."""
    from trainkit.trainer.manifest import _own_hash

    content = json.loads((folder / "manifest.json").read_text())
    content = {name: value for name, value in content.items() if name not in ("owner", "sha256")}
    (folder / "manifest.json").write_text(json.dumps({**content, "sha256": _own_hash(content)}))


def test_a_run_folder_that_was_copied_without_hidden_files_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin()
    put(tmp_path, 1)
    (tmp_path / "resolved.yaml").touch()
    (tmp_path / MARK).unlink()
    folder.begin()
    assert [entry.step for entry in list_complete(folder.checkpoints)] == [1]


def test_a_run_folder_without_a_token_and_checkpoints_of_several_runs_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step, OwnershipToken.new())
    (tmp_path / "resolved.yaml").touch()
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).begin()
    assert str(caught.value) == (
        f"{tmp_path} has no token (.owner), and its checkpoints carry those of several runs. Copy .owner from the "
        f"folder that it was copied from, or start a new run with resume={tmp_path}/checkpoints/step_00000002"
    )


def test_a_damaged_token_of_a_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").touch()
    (tmp_path / MARK).write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).begin()
    assert str(caught.value) == (
        f"{tmp_path}/.owner cannot be read: its key token is missing. It identifies the checkpoints of this run. "
        "Restore the file, or remove it: then the token is taken from the checkpoints."
    )


def test_a_folder_in_which_a_run_did_not_begin_keeps_the_users_files(tmp_path: Path) -> None:
    for users in (True, False):
        folder = RunFolder.claim(tmp_path / f"run{users}")
        folder.begin()
        if users:
            (folder.path / "thesis.tex").touch()
        folder.discard()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["runTrue", "runTrue/thesis.tex"]


def test_a_file_in_the_place_of_a_run_folder_is_named_and_stays_alone(tmp_path: Path) -> None:
    (file := tmp_path / "notes").touch()
    (nowhere := tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (itself := tmp_path / "itself").symlink_to(tmp_path / "itself")
    for first in (file, nowhere, itself):
        for path in (first, first / "run"):
            with pytest.raises(StorageError) as caught:
                RunFolder.claim(path)
            assert str(caught.value).startswith(f"{path} cannot be the folder of a run: {first} is no folder.")
    assert {*tmp_path.iterdir()} == {file, nowhere, itself}


def test_a_start_from_absent_weights_is_refused_before_anything_is_written(cwd: Path) -> None:
    (cwd / "text").write_text("no weights")
    (cwd / "itself").symlink_to(cwd / "itself")
    for name in ("absent", "text", "itself"):
        assert main(["recipe=null", f"init_from={name}"]) == 2
    assert {path.name for path in cwd.iterdir()} == {"text", "itself"}


@pytest.mark.parametrize("content", ["", '{"pid": 1, "host": "h", "since": "s"}'])
def test_a_lock_of_a_job_that_never_began_is_deleted_unless_it_is_held(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    with locked(tmp_path / ".lock"):
        discard_lock(tmp_path / ".lock")
        assert (tmp_path / ".lock").exists()
    discard_lock(tmp_path / ".lock")
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_trainkit_did_not_write_is_neither_deleted_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    discard_lock(tmp_path / ".lock")
    with pytest.raises(ConfigError) as caught, locked(tmp_path / ".lock"):
        pass
    assert str(caught.value).splitlines()[1] == (
        f"  run folder={tmp_path}: has a .lock that is not a lock file of trainkit: it is not JSON: Expecting value: "
        "line 1 column 1 (char 0). Rename it, or choose another folder."
    )
    assert (tmp_path / ".lock").read_text() == "mine"


ALLOWED = {
    "tracking/state.py": "its own draft",
    "trainer/ownership.py": "removes what carries the token and a lock that no process holds, and renames the rest",
    "api/evaluation.py": "the folder of an evaluation, which this call has made",
    "api/prediction.py": "the parts of a prediction beside its file: by name, and below processes/",
    "inference/parts.py": "parts of a prediction, by the names that it gives them",
    "inference/writing.py": "a temporary file of this process",
    "exporting/folder.py": "an earlier export with the token of the run; other files in it are kept",
    "trainer/cleanup.py": "the same of checkpoints",
    "exporting/torch_program.py": "an earlier form of a file in the draft of this export",
    "verbs/support/measured.py": "an empty folder that this call has made",
    "measuring/bench.py": "the temporary folder that this call has made",
    "trainer/checkpoint/retention.py": "index.json and evaluated.json, set aside before the first save",
    "trainer/checkpoint/saving.py": "gives a complete draft its name, once nothing is there",
    "verbs/starting/init.py": "a draft of this process, which becomes a folder that was not there",
    "report/events.py": "event files with the token of the run in their names",
    "report/curves.py": "a picture, set aside before the first run (run/folder/run_folder.py)",
    "callbacks/every_run.py": "metrics.jsonl, set aside before the first run (run/folder/run_folder.py)",
    "data/reading/files.py": "a download in a temporary folder of its own; its target was absent",
    "sweeps/backends/launching.py": "the description of a job that this process wrote",
    "run/backends/attempt.py": ".attempts and .stop, set aside before the first run (run/folder/run_folder.py)",
    "run/supervisor/restart_policy.py": "an error report in the live folder of the run",
    "run/rendezvous/relaunch.py": "the record of this launch, whose content names this run folder",
    "run/session/await_evaluator.py": "an error report of an earlier life, in the live folder of the run",
    "run/record.py": "a temporary file of this process",
    "run/page.py": "drafts of the page that killed processes have left: by name, first bytes and age",
    "files.py": "a temporary file of this process, and the place that its caller names",
    "storage.py": "a probe of this process, of a name of its own",
    "run/folder/run_folder.py": "result.json and .owner of a folder with a token",
}


def test_a_token_that_a_kill_has_left_half_written_does_not_keep_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = OwnershipToken.new()
    put(tmp_path, 1, owner)
    root = tmp_path / "checkpoints"
    (checkpoint,) = list_complete(root)
    (checkpoint.folder / f"{MARK}.4700").write_text('{"token"')
    delete(checkpoint, owner)
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    assert capsys.readouterr().err == ""


def test_every_place_that_deletes_or_replaces_is_known() -> None:
    deleting = re.compile(
        r"rmtree|\.unlink\(|rmdir\(|\.rename\(|os\.(replace|rename|remove)|shutil\.move|(partial|part|temporary)\.replace\("
    )
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if deleting.search(path.read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="the system has no such links")
def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("")
    (tmp_path / ".lock").symlink_to(tmp_path / "users")
    with (
        pytest.raises(UnreadableError, match="it is a symbolic link"),
        locked(tmp_path / ".lock"),
    ):
        pass
    assert (tmp_path / "users").read_text() == ""
