"""An image read with other pixels, turned or in another class, or left out without a count, is caught here alone."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.config.sections import CvConfig
from trainkit.data.sets import images
from trainkit.data.sets.images import Digits, FashionMnist, ImageFiles, ImageFolder
from trainkit.data.splits import folded
from trainkit.errors import ConfigError, DataError

image = pytest.importorskip("PIL.Image")


def test_the_digits_are_split_once_and_by_class_and_scaled_by_those_to_train_on() -> None:
    train, val = Digits(split="train"), Digits(split="val")
    assert (len(train), len(val)) == (1437, 360)
    assert torch.bincount(val.tensors()[1]).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    assert (float(train.tensors()[0].min()), float(train.tensors()[0].max())) == (0, 1)
    pixels = Digits(split="train", scaling="standard").tensors()[0]
    assert [float(pixels.mean()), float(pixels.std())] == pytest.approx([0, 1], abs=1e-3)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Fashion-MNIST with black images, in its real size, and the SHA-256 of its files."""
    folder, hashes = tmp_path_factory.mktemp("idx"), {}
    for stem, count in (("train", 60_000), ("t10k", 10_000)):
        files = {f"{stem}-images-idx3-ubyte": bytes(16 + count * 784), f"{stem}-labels-idx1-ubyte": bytes(8 + count)}
        for name, content in files.items():
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
            hashes[name] = hashlib.sha256(content).hexdigest()
    return folder, hashes


@pytest.fixture
def idx(packed: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, whose hashes are those that are expected."""
    folder, hashes = packed
    monkeypatch.setattr(images, "_SHA256", dict(hashes))
    return Path(shutil.copytree(folder, tmp_path / "idx"))


def test_fashion_mnist_holds_out_the_last_training_images(idx: Path) -> None:
    sizes = {split: len(FashionMnist(path=idx, split=split, val_size=1000)) for split in ("train", "val", "test")}

    assert sizes == {"train": 59_000, "val": 1000, "test": 10_000}
    assert FashionMnist.splits({"val_size": 0}) == ("train", "test")
    assert FashionMnist.splits({}) == ("train", "val", "test")


def test_a_damaged_or_absent_idx_file_is_named(idx: Path) -> None:
    labels = idx / "t10k-labels-idx1-ubyte.gz"
    damage: dict[str, Callable[[], object]] = {
        "is not the expected file: unpacked, its SHA-256": lambda: labels.write_bytes(gzip.compress(b"other")),
        "cannot be unpacked": lambda: labels.write_bytes(b"not gzip"),
        "there is no such file": labels.unlink,
    }
    for reason, change in damage.items():
        change()
        with pytest.raises(DataError, match=rf"t10k-labels-idx1-ubyte.gz:? {reason}"):
            FashionMnist(path=idx, split="test")


def test_a_missing_fashion_mnist_names_the_ways_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "_DEBIAN", tmp_path / "none")
    with pytest.raises(ConfigError, match="Install the Debian package dataset-fashion-mnist"):
        FashionMnist(split="train")


SMALL: dict[str, Any] = {"image_size": 16, "resize": 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, names in (("train", ("bird", "cat")), ("val", ("bird", "cat"))):
        for label, name in enumerate(names):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = np.random.default_rng(number).integers(0, 255, (40, 60, 3), dtype=np.uint8)
                pixels[..., 0] = 255 * label
                image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
            (tmp_path / split / name / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_are_the_sorted_folders(folder: Path) -> None:
    data = ImageFolder(path=folder, split="val", **SMALL)

    assert data.classes == ("bird", "cat")
    assert [data[index][1] for index in range(len(data))] == [0, 0, 0, 1, 1, 1]
    assert data[0][0].shape == (3, 16, 16)
    assert float(data[5][0][0].min()) == pytest.approx((1 - 0.485) / 0.229)


def test_a_fold_that_is_held_out_is_not_augmented(folder: Path) -> None:
    parts = folded({"train": ImageFolder(path=folder, split="train", **SMALL)}, CvConfig(folds=3, fold=0))
    for name, is_still in (("train", False), ("val", True)):
        assert torch.equal(parts[name][0][0], parts[name][0][0]) == is_still


def test_a_folder_that_does_not_do_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.image_size=300: larger than .*256"):
        ImageFolder(path=folder, split="train", image_size=300)
    (folder / "val" / "dog").mkdir()
    (folder / "empty" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"val has classes that train does not have: 'dog'\.$"):
        ImageFolder(path=folder, split="val")
    with pytest.raises(DataError, match=r"holds no class folders: images are expected as"):
        ImageFolder(path=folder / "empty", split="train")


def test_a_ramp_of_16_bits_is_the_ramp_of_8(folder: Path) -> None:
    ramp = np.arange(256, dtype=np.uint16).repeat(256).reshape(256, 256)
    names = ["8.PNG", "16.png", "16.tif", "16.pgm"]
    for number, name in enumerate(names):
        content = ramp.astype(np.uint8) if number == 0 else ramp * 257
        image.fromarray(content).save(folder / "val" / "bird" / name)
    data = ImageFolder(path=folder, split="val", image_size=256, augment=False)
    indices = [index for index, file in enumerate(data._files) if Path(file).name in names]
    assert len(indices) == 4
    assert all(torch.equal(data[index][0], data[indices[0]][0]) for index in indices)
    assert "3 of 10 images have 16 bits per pixel, of which the higher 8 are read" in data.notes[-1]


def test_an_image_without_a_range_is_refused_by_its_name(folder: Path) -> None:
    for number, kind in enumerate((np.float32, np.int32)):
        image.fromarray(np.ones((40, 60), dtype=kind)).save(folder / "val" / "bird" / f"{number}.tif")
    data = ImageFolder(path=folder, split="val")
    with pytest.raises(DataError, match=r"^sample 1 cannot be read: .*0\.tif: its pixels are 32-bit numbers without a"):
        data[1]
    with pytest.raises(DataError, match=r"^2 of 8 images cannot be read: .*0\.tif: .*mode F.*1\.tif: .*mode I"):
        _ = data.notes


def test_a_turned_picture_is_read_upright_unless_exif_is_ignored(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    exif = image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees, clockwise
    image.fromarray(np.rot90(pixels)).save(folder / "val" / "bird" / "9.png", exif=exif)
    image.fromarray(pixels).save(folder / "val" / "bird" / "8.png")
    keys: dict[str, Any] = {"path": folder, "split": "val", "image_size": 40, "resize": 40}
    turned, stored = ImageFolder(**keys), ImageFolder(**keys, exif="ignore")
    assert torch.equal(turned[4][0], turned[3][0])
    assert torch.equal(stored[4][0], torch.rot90(stored[3][0], dims=(1, 2)))
    assert "1 of 8 images are turned upright (data.exif=apply): their EXIF orientation says how" in turned.notes[-1]
    assert "1 of 8 images are not turned upright (data.exif=ignore)" in stored.notes[-1]


def test_what_is_left_out_of_a_folder_is_counted(folder: Path) -> None:
    train = folder / "train"
    for name in (".ipynb_checkpoints", "bird/more/deep", "bird/.thumbs", "empty", "cat "):
        (train / name).mkdir(parents=True)
        image.new("RGB", (40, 60)).save(train / name / ".hidden.png")
        if name not in ("empty", "cat "):
            image.new("RGB", (40, 60)).save(train / name / "x.jfif", format="jpeg")
    (train / "list.csv").touch()
    data = ImageFolder(path=folder, split="train")
    assert data.classes == ("bird", "cat", "cat ", "empty")
    assert [Path(file).name for file, label in zip(data._files, data.labels, strict=True) if label == 0] == [
        "0.png",
        "1.png",
        "2.png",
        "x.jfif",
    ]
    assert [note.partition(": ")[2] for note in data.notes] == [
        "left out beside the class folders: .ipynb_checkpoints, list.csv",
        "7 files are left out (.txt: 2, hidden: 5)",
        "classes differ in case or blanks only: 'cat', 'cat '",
        "there is no image of the classes 'cat ', 'empty'",
    ]


def test_transparent_and_animated_images_are_counted(folder: Path) -> None:
    frames = [image.new("RGBA", (40, 60), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "val" / "bird" / "a.png")
    frames[0].save(folder / "val" / "bird" / "b.gif", save_all=True, append_images=frames[1:])
    notes = ImageFolder(path=folder, split="val").notes
    assert [note.partition(": ")[2] for note in notes[1:]] == [
        "1 of 8 images are partly transparent, which is left out",
        "1 of 8 images have several frames or pages, of which the first is read",
    ]


def test_a_link_to_a_folder_above_is_refused(folder: Path) -> None:
    (folder / "val" / "bird" / "loop").symlink_to(folder / "val" / "bird")
    with pytest.raises(DataError, match=r"bird/loop is a link to a folder above, whose images would be read again\."):
        ImageFolder(path=folder, split="val")


def test_images_without_labels_are_prepared_as_in_validation(folder: Path) -> None:
    for name in ("bird/.hidden.png", ".thumbs/a.png"):
        (folder / "val" / name).parent.mkdir(exist_ok=True)
        image.new("RGB", (9, 9)).save(folder / "val" / name)
    unlabelled, labelled = ImageFiles(path=folder / "val", **SMALL), ImageFolder(split="val", path=folder, **SMALL)
    assert unlabelled.ids == tuple(f"{name}/{index}.png" for name in ("bird", "cat") for index in range(3))
    assert all(torch.equal(unlabelled[index], labelled[index][0]) for index in range(6))
    assert unlabelled.notes == ("val: 4 files are left out (.txt: 2, hidden: 2)",)


def test_a_damaged_image_of_any_kind_names_its_sample(folder: Path) -> None:
    content = (folder / "val/bird/0.png").read_bytes()
    (folder / "val/bird/0.png").write_bytes(content.replace(b"IDAT", b"IDAX"))  # a SyntaxError of Pillow
    (folder / "val/bird/1.png").write_bytes(content[:40])
    (folder / "val/bird/2.png").write_text("")
    data = ImageFiles(path=folder / "val", **SMALL)
    for index in range(3):
        with pytest.raises(DataError, match=rf"sample {index} cannot be read: .*{index}\.png: "):
            data[index]
