from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainkit.data.sets.image_folder import ImageFolder
from trainkit.data.sets.tables import CsvTable
from trainkit.data.sets.text import TextFile
from trainkit.data.sets.unlabelled import ImageFiles, TextLines
from trainkit.errors import DataError


def test_images_without_labels_are_prepared_as_in_validation(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("train/cat/b.png", "val/cat/a.png", "val/cat/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(len(name)).integers(0, 255, (9, 12, 3), dtype=np.uint8)
        image.fromarray(pixels).save(tmp_path / name)
    labelled = ImageFolder(split="val", path=tmp_path, image_size=4, resize=6)
    found = ImageFiles(path=tmp_path / "val", image_size=4, resize=6)
    assert found.ids == ("cat/a.png", "cat/b.png")
    assert all(torch.equal(found[place], labelled[place][0]) for place in range(2))


def test_a_damaged_image_of_any_kind_names_its_sample(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((9, 12, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(content.replace(b"IDAT", b"IDAX"))  # a SyntaxError of Pillow
    (tmp_path / "c.png").write_bytes(content[:40])
    (tmp_path / "d.png").write_text("")
    found = ImageFiles(path=tmp_path, image_size=4, resize=6)
    for place, name in enumerate("bcd", start=1):
        with pytest.raises(DataError, match=rf"sample {place} cannot be read: .*{name}\.png: "):
            found[place]


def test_lines_have_the_tokens_of_the_text_that_the_model_knows(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("abc def\n")
    (tmp_path / "new.txt").write_text("fed\ncab\n")
    lines = TextLines(path=tmp_path / "new.txt", context=4, reference=tmp_path / "known.txt")
    known = TextFile(split="train", path=tmp_path / "known.txt", context=2, val_share=0.5)
    assert lines[0].tolist() == [*known.encode("fed"), 0]
    assert torch.equal(lines.gather(torch.arange(2))[1], lines[1])
    assert list(lines.ids) == [1, 2]
    assert TextLines(path=tmp_path / "new.txt", context=4)[0].tolist() == [*b"fed", 0]


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_bytes("\ufeffa\u2028b\r\n\n\x0cc".encode())
    lines = TextLines(path=tmp_path / "new.txt", context=8)
    rows = [bytes(lines[place].tolist()).rstrip(b"\0").decode() for place in range(len(lines))]
    assert rows == ["a\u2028b", "", "\x0cc"]


def test_hidden_images_and_other_files_are_left_out_and_counted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a/b.png", ".thumbs/a.png", "a/._b.png", "a/list.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.new("RGB", (9, 9)).save(tmp_path / name, format="png")
    found = ImageFiles(path=tmp_path, image_size=4, resize=6)
    assert found.ids == ("a/b.png",)
    assert found.notes == (f"{tmp_path.name}: 3 files are left out (.csv: 1, hidden: 2)",)


def test_a_line_that_is_too_long_or_has_an_unknown_character_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("fed\nz\n")
    (tmp_path / "known.txt").write_text("abcdef")
    with pytest.raises(DataError, match=r"line 1 of .*new.txt has 3 tokens, more than data.context=2\. Cut it"):
        TextLines(path=tmp_path / "new.txt", context=2)
    with pytest.raises(
        DataError, match=r"line 2 of .*new.txt has the character 'z', which .*known.txt does not have\."
    ):
        TextLines(path=tmp_path / "new.txt", context=3, reference=tmp_path / "known.txt")


def test_the_rows_of_another_table_are_scaled_as_in_training_and_need_no_target(tmp_path: Path) -> None:
    rows = "".join(f"{place},{place * 2},{place}\n" for place in range(20))
    (tmp_path / "old.csv").write_text(f"x,z,y\n{rows}")
    (tmp_path / "new.csv").write_text("z,x\n4,2\n0,7\n")
    old = CsvTable(split="train", path=tmp_path / "old.csv", target="y")
    new = CsvTable(split="all", path=tmp_path / "new.csv", target="y", reference=tmp_path / "old.csv")
    assert len(new) == 2
    (features,) = new[0]
    same = next(row for row, target in (old[place] for place in range(len(old))) if target == 2)
    assert torch.equal(features, same)
