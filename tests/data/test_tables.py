from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.data.batch_transforms import CropAndFlip
from trainkit.data.sets import cifar10
from trainkit.data.sets.cifar10 import Cifar10
from trainkit.data.sets.tables import CsvTable, Friedman
from trainkit.errors import DataError


def written(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["size,colour,price", *rows]) + "\n", encoding="utf-8")
    return path


ROWS = [f"{number},{'red' if number % 3 else 'blue'},{2 * number}" for number in range(20)]


def test_a_table_is_scaled_by_its_training_rows_alone(tmp_path: Path) -> None:
    splits = [
        CsvTable(split=split, path=written(tmp_path / "t.csv", ROWS), target="price", val_share=0.25)
        for split in ("train", "val")
    ]

    (train, prices), (val, others) = (split.tensors() for split in splits)

    assert (train.shape, val.shape) == ((15, 3), (5, 3))
    assert sorted([*prices.tolist(), *others.tolist()]) == [2.0 * number for number in range(20)]
    assert abs(float(train[:, 0].mean())) < 1e-6
    sizes = (torch.cat([prices, others]) / 2 - prices.mean() / 2) / (prices / 2).std(correction=0)
    torch.testing.assert_close(torch.cat([train, val])[:, 0], sizes)
    blue = (torch.cat([prices, others]) / 2) % 3 == 0
    assert torch.equal(torch.cat([train, val])[:, 1], blue.float())


def test_rows_to_predict_are_scaled_as_those_that_were_trained_on(tmp_path: Path) -> None:
    reference = written(tmp_path / "t.csv", ROWS)
    known = CsvTable(split="train", path=reference, target="price", val_share=0.0)
    one = written(tmp_path / "new.csv", [ROWS[7], "7,green,0"])

    rows = CsvTable(split="train", path=one, target="price", val_share=0.0, reference=reference).tensors()[0]

    assert torch.equal(rows[0], known.tensors()[0][7])
    assert rows[1].tolist() == [float(rows[0, 0]), 0.0, 0.0]


def test_classes_are_numbered_in_the_order_of_their_texts(tmp_path: Path) -> None:
    table = CsvTable(
        split="train", path=written(tmp_path / "t.csv", ROWS), target="colour", target_kind="class", val_share=0.0
    )
    assert table.tensors()[1].tolist() == [int(number % 3 > 0) for number in range(20)]
    assert table.tensors()[0].shape == (20, 2)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "there are no rows below the header"),
        (["1,red"], {}, "has 3 columns: line 2 has 2 cells"),
        (["1,red,2", ",red,2"], {}, "line 3 has an empty cell"),
        (["1,red,nan", "2,red,1"], {}, "data.target=price: 'nan' is not a finite number. Use data.target_kind=class"),
        (ROWS, {"target": "weight"}, "has no column weight. Its columns are size, colour, price."),
        (ROWS, {"columns": ["depth", "size"]}, "has no column depth. Its columns are"),
    ],
)
def test_a_bad_table_is_refused_with_its_line_or_column(
    rows: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"target": "price", "val_share": 0.0, **settings}
    with pytest.raises(DataError) as caught:
        CsvTable(split="train", path=written(tmp_path / "t.csv", rows), **given)
    assert message in str(caught.value)


def test_the_made_table_has_the_noise_that_it_names() -> None:
    clean, noisy = (Friedman(split="val", noise=noise).tensors() for noise in (0.0, 1.0))
    assert torch.equal(clean[0], noisy[0])
    assert float((noisy[1] - clean[1]).std()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(Friedman(split="train", num_samples=2000).tensors()[0], clean[0])


def test_cifar_files_are_read_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "_RECORDS", 4)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    for place, name in enumerate((*cifar10._TRAIN, "test_batch.bin")):
        part = slice(4 * place, 4 * place + 4)
        records = [bytes([number % 10]) + image.tobytes() for number, image in enumerate(pixels[part])]
        (tmp_path / name).write_bytes(b"".join(records))

    val = Cifar10(split="val", path=tmp_path, val_size=3, scaling="unit")

    assert [len(Cifar10(split=split, path=tmp_path, val_size=3)) for split in ("train", "val", "test")] == [17, 3, 4]
    torch.testing.assert_close(val.tensors()[0], torch.from_numpy(pixels[17:20]).float() / 255)
    assert val.tensors()[1].tolist() == [1, 2, 3]


def test_a_wrong_file_of_cifar_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data\.path is not set\. Unpack cifar-10-binary\.tar\.gz"):
        Cifar10(split="test")
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(DataError, match=r"test_batch\.bin has 3,073 bytes, and a file of CIFAR-10 has 30,730,000\."):
        Cifar10(split="test", path=tmp_path)
    monkeypatch.setattr(cifar10, "_RECORDS", 1)
    with pytest.raises(DataError, match="an image has the class 10"):
        Cifar10(split="test", path=tmp_path)


def test_each_image_is_shifted_and_mirrored_on_its_own() -> None:
    images = torch.arange(6 * 2 * 5 * 7, dtype=torch.float32).view(6, 2, 5, 7) + 1
    np.random.seed(0)  # noqa: NPY002 - as the loader keys it
    moved, _ = CropAndFlip(padding=2)((images, torch.zeros(6)))

    padded = torch.nn.functional.pad(images, [2] * 4)
    seen = set()
    for image, big in zip(moved, padded, strict=True):
        found = [
            (row, column, flips)
            for row in range(5)
            for column in range(5)
            for flips in (False, True)
            if torch.equal(image.flip(-1) if flips else image, big[:, row : row + 5, column : column + 7])
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 3
    assert {flips for _, _, flips in seen} == {False, True}
