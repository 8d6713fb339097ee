"""A key that names an absent file, and is found out only when the data is read, is caught here alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError
from trainkit.fields import Reads, a_file, a_folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data=text_file data.path=.", "data.path=.: is a folder, and a file is needed."),
        ('data=csv_table data.target=x data.path="~/no"', "data.path=HOME/no: there is no such file."),
        ("data=token_memmap data.path=link", "data.path=link: is a link to nothing."),
        ("data=fashion_mnist data.path=no", "data.path=no: there is no such folder below HOME."),
        ("data=text_lines data.path=file data.reference=pipe", "data.reference=pipe: is a pipe or device, and a"),
        (
            "data=splits data.train={_target_:trainkit.data.TextLines,path:.}",
            "data.train.path=.: is a",
        ),
        ("data=fashion_mnist data.path=file data.download=true", "data.path=file: is a file, and a folder is needed."),
        ("init_from=no", "init_from=no: there is no such file or folder below HOME."),
    ],
)
def test_a_key_that_names_no_such_file_is_refused_before_anything_starts(
    line: str, message: str, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(cwd))
    Path("file").touch()
    Path("link").symlink_to("no")
    os.mkfifo("pipe")
    composition = compose(["recipe=null", "steps=1", *line.split(" ")])
    with pytest.raises(ConfigError) as caught:
        checked(composition)
    assert message.replace("HOME", str(cwd)) in str(caught.value)
    checked(replace(composition, reads_files=False))


def test_what_a_run_creates_or_does_not_need_may_be_absent(cwd: Path) -> None:
    checked(compose(["recipe=null", "steps=1", "data=fashion_mnist", "data.path=no", "data.download=true"]))
    checked(compose(["recipe=null", "steps=1", "resume=auto", "init_from=no"]))


def test_a_mark_names_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    assert a_folder.rule(tmp_path) is None
    assert a_file.rule("") == "is empty. Name a file."
    assert a_file.rule("a\0b") == "cannot be read: embedded null byte."
    assert Reads().rule("x" * 300) == "cannot be read: File name too long."
