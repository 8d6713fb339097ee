"""A table scaled by rows that it is validated on, or a cell guessed to be a number or a text, is caught here alone.

A row of a Spark frame that is read twice, in another order, or as another number, is caught here alone.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainkit import errors, spark
from trainkit.data.reading.loader import collated
from trainkit.data.sets import images
from trainkit.data.sets.images import Cifar10
from trainkit.data.sets.spark_frame import SparkFrame
from trainkit.data.sets.synthetic import Friedman, Synthetic, SyntheticTokens
from trainkit.data.sets.tables import CsvTable
from trainkit.data.splits import build_splits
from trainkit.errors import ConfigError, DataError, MissingExtraError
from trainkit.extras import install_command


def write_csv(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["size,colour,price", *rows]) + "\n", encoding="utf-8")
    return path


ROWS = [f"{number},{'red' if number % 3 else 'blue'},{2 * number}" for number in range(20)]


def test_a_table_is_scaled_by_its_training_rows_alone(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", ROWS)
    (train, prices), (val, val_prices) = (
        CsvTable(split=split, path=path, target="price", val_share=0.25).tensors() for split in ("train", "val")
    )

    assert (train.shape, val.shape) == ((15, 3), (5, 3))
    assert sorted([*prices.tolist(), *val_prices.tolist()]) == [2.0 * number for number in range(20)]
    assert abs(float(train[:, 0].mean())) < 1e-6
    sizes = (torch.cat([prices, val_prices]) / 2 - prices.mean() / 2) / (prices / 2).std(correction=0)
    torch.testing.assert_close(torch.cat([train, val])[:, 0], sizes)
    blue = (torch.cat([prices, val_prices]) / 2) % 3 == 0
    assert torch.equal(torch.cat([train, val])[:, 1], blue.float())


def test_classes_are_numbered_in_the_order_of_their_texts(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"target": "colour", "target_kind": "class", "val_share": 0.0}
    features, classes = CsvTable(split="train", path=write_csv(tmp_path / "t.csv", ROWS), **keys).tensors()
    assert classes.tolist() == [int(number % 3 > 0) for number in range(20)]
    assert features.shape == (20, 2)


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {}, "no rows below the header"),
    (["1,red"], {}, "3 columns: line 2 has 2 cells"),
    (["1,red,2", ",red,2"], {}, "line 3, column size: is missing"),
    (["1,red,2", "NA,red,2"], {}, "line 3, column size: 'NA' is not a finite number, and 1 of 2"),
    (["1,red,2", "inf,red,2"], {}, """'data.categories=["size"]' or 'data.missing=["inf"]' data.on_missing=drop."""),
    (['"1,5",red,2'], {}, """or 'data.decimal=","'."""),
    (["1,red,2", "1_0,red,2", "3,red,2"], {}, "line 3, column size: '1_0'"),
    (["1,red,2", "2,nan,2"], {}, "line 3, column colour: 'nan'"),
    (["1,red,2", "2,red ,2"], {}, "line 3, column colour: 'red', 'red ' differ in blanks only"),
    (["1,red,2", "2,r\0d,2"], {}, "line 3 holds a null character"),
    (["1,red,2", '2,"red"d,2'], {}, "line 3 cannot be read as CSV"),
    (["1,red,2", "2,blue,2,"], {}, "3 columns: line 3 has 4 cells"),
    (["1,red,1e300"], {}, "line 2, column price: is beyond the range of float32"),
    (["1,red,2"], {"delimiter": ";"}, "Its columns are size,colour,price. Give the character"),
    (["1,red,2"], {"encoding": "klingon"}, "data.encoding=klingon"),
    (ROWS, {"target": "weight"}, "has no column weight"),
    (ROWS, {"columns": ["depth", "size"]}, "has no column depth"),
]


@pytest.mark.parametrize(("rows", "settings", "message"), REFUSED)
def test_a_bad_table_is_refused_with_its_line_or_column(
    rows: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"target": "price", "val_share": 0.0, **settings}
    with pytest.raises((DataError, ConfigError), match=re.escape(message)):
        CsvTable(split="train", path=write_csv(tmp_path / "t.csv", rows), **keys)


def table(path: Path, text: str, **settings: Any) -> CsvTable:
    path.write_bytes(text.encode(settings.get("encoding", "utf-8")))
    return CsvTable(**{"split": "train", "path": path, "target": "y", "val_share": 0.0, **settings})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("x,x,y", "two columns have the name 'x'"),
        ("y", "no column for a feature beside the target y"),
        (",x,y", "column 1 has no name"),
        ("1,2,3", "its first line holds numbers"),
        ("x, y,z", "has no column y. Its columns are x,  y, z. Names have blanks at their ends: give data.strip=true."),
        ("ü,y", "line 1 holds the byte 0xfc, which is not utf-8. Give its encoding"),
    ],
)
def test_a_header_that_does_not_do_is_refused(header: str, message: str, tmp_path: Path) -> None:
    row = ",".join("123"[: header.count(",") + 1])
    (tmp_path / "t.csv").write_bytes(f"{header}\n{row}\n".encode("latin-1"))
    with pytest.raises(DataError, match=re.escape(message)):
        CsvTable(split="train", path=tmp_path / "t.csv", target="y", val_share=0.0)


def test_a_file_of_another_program_is_read_as_its_keys_declare(tmp_path: Path) -> None:
    text = 'x; kind;y\n"1,5"; é ;1\n"2,5";o;"2,25"\n'
    keys: dict[str, Any] = {"encoding": "latin-1", "delimiter": ";", "decimal": ",", "strip": True}
    features, targets = table(tmp_path / "t.csv", text, **keys).tensors()
    assert features.tolist() == [[-1, 0, 1], [1, 1, 0]]
    assert targets.tolist() == [1, 2.25]
    tabs = table(tmp_path / "u.csv", "\ufeffx\ty\n1\t2\n3\t4\n", delimiter="tab", encoding="utf-16-le")
    assert tabs.tensors()[0].tolist() == [[-1], [1]]


def test_missing_cells_are_left_out_or_filled_where_asked_and_counted(tmp_path: Path) -> None:
    text = "x,kind,y\n1,a,1\nNA,b,2\n\n3,,3\n5,a,4\n"
    keys: dict[str, Any] = {"missing": ["NA"]}
    dropped = table(tmp_path / "t.csv", text, **keys, on_missing="drop")
    filled = table(tmp_path / "t.csv", text, **keys, on_missing="fill")
    assert dropped.tensors()[1].tolist() == [1, 4]
    assert filled.tensors()[0][:, 1:].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert filled.tensors()[0][1, 0] == 0
    assert dropped.notes[1:] == (
        "t.csv (train): 1 blank lines are left out",
        "t.csv (train): 2 of 4 rows are left out, since a cell is missing (x: 1, kind: 1)",
    )
    assert filled.notes[2] == "t.csv (train): missing cells are filled (x: 1, kind: 1)"
    with pytest.raises(DataError, match=r"line 2, column y: is missing \(y: 1\)\. A target is not filled: give"):
        table(tmp_path / "t.csv", "x,y\n1,\n", on_missing="fill")


def test_a_table_says_which_columns_are_numbers_and_which_texts(tmp_path: Path) -> None:
    text = "day,zip,kind,x,y\n2024-01-01,01,a,1,1\n2024-01-02,02,A,2,2\n"
    data = table(tmp_path / "t.csv", text, categories=["zip"])
    assert data.tensors()[0].shape == (2, 7)
    assert data.notes == (
        "t.csv (train): numbers in x; one feature per text in day (2), zip (2), kind (2)",
        "t.csv (train): texts of kind differ in case only: 'A', 'a'",
    )


def test_texts_that_no_training_row_has_are_counted(tmp_path: Path) -> None:
    rows = "".join(f"{number},t{number},1\n" for number in range(10))
    val = table(tmp_path / "t.csv", f"x,kind,y\n{rows}", split="val", val_share=0.2)
    assert val.tensors()[0][:, 1:].sum() == 0
    assert val.notes == ("t.csv (val): 2 cells of kind hold a text of no training row: all zeros (line 6: 't4')",)
    keys: dict[str, Any] = {"target": "kind", "target_kind": "class", "split": "val", "val_share": 0.2}
    with pytest.raises(DataError, match=r"line 6, column kind: no training row has the class 't4'\. Use another"):
        table(tmp_path / "t.csv", f"x,kind,y\n{rows}", **keys)


def test_the_made_table_has_the_noise_that_it_names() -> None:
    clean, noisy = (Friedman(split="val", noise=noise).tensors() for noise in (0.0, 1.0))
    assert torch.equal(clean[0], noisy[0])
    assert float((noisy[1] - clean[1]).std()) == pytest.approx(1, abs=0.05)


def test_cifar_files_are_read_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_RECORDS", 4)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    for index, name in enumerate((*images._TRAIN, "test_batch.bin")):
        part = slice(4 * index, 4 * index + 4)
        records = [bytes([number % 10]) + image.tobytes() for number, image in enumerate(pixels[part])]
        (tmp_path / name).write_bytes(b"".join(records))

    val = Cifar10(split="val", path=tmp_path, val_size=3, scaling="unit")

    assert [len(Cifar10(split=split, path=tmp_path, val_size=3)) for split in ("train", "val", "test")] == [17, 3, 4]
    torch.testing.assert_close(val.tensors()[0], torch.from_numpy(pixels[17:20]).float() / 255)
    assert val.tensors()[1].tolist() == [1, 2, 3]


def test_a_wrong_file_of_cifar_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: is not set\. Unpack cifar-10-binary\.tar\.gz"):
        Cifar10(split="test")
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(DataError, match=r"test_batch\.bin has 3,073 bytes, and a file of CIFAR-10 has 30,730,000\."):
        Cifar10(split="test", path=tmp_path)
    monkeypatch.setattr(images, "_RECORDS", 1)
    with pytest.raises(DataError, match="an image has the class 10"):
        Cifar10(split="test", path=tmp_path)


def test_rows_to_predict_need_no_target_and_are_scaled_as_those_that_were_trained_on(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    rows = "".join(f"{number},{'ab'[number % 2]},{number * 2},{number}\n" for number in range(20))
    trained = table(old, f"x,kind,z,y\n{rows}", val_share=0.1)
    (features, prices) = trained.tensors()
    data = table(new, "z,x,kind\n4,2,a\n0,7,c\n", split="all", reference=old, val_share=0.1)
    assert torch.equal(data[0][0], features[prices.tolist().index(2.0)])
    assert data[1][0][1:3].tolist() == [0.0, 0.0]  # a kind that no training row has
    assert len(data) == 2


def test_rows_of_the_reference_are_left_out_as_in_training_and_rows_to_predict_are_not(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    trained = table(old, "x,y\n1,1\n?,2\n3,3\n", missing=["?"], on_missing="drop")
    keys: dict[str, Any] = {"split": "all", "reference": old, "missing": ["?"]}
    assert torch.equal(table(new, "x\n3\n1\n", on_missing="drop", **keys).tensors()[0].flip(0), trained.tensors()[0])
    with pytest.raises(DataError, match=r"new\.csv: line 2, column x: is missing .* A row to predict is not left out"):
        table(new, "x\n?\n", on_missing="drop", **keys)


@pytest.mark.parametrize("shape", [[6], [2, 8, 8], [3, 20, 20]])
def test_samples_are_the_same_whole_or_one_by_one(shape: list[int]) -> None:
    data = Synthetic(split="train", shape=shape, num_samples=12)
    samples, labels = map(torch.as_tensor, collated(data))
    assert samples.shape == (12, *shape)
    assert torch.equal(samples[7], data[7][0])
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_samples_lie_nearest_to_the_prototype_of_their_class() -> None:
    data = Synthetic(split="val", shape=[64], val_samples=200, noise=0.5)
    samples, labels = map(torch.as_tensor, collated(data))
    assert torch.equal(torch.cdist(samples, data._prototypes).argmin(1), labels)
    assert not torch.equal(Synthetic(split="train", shape=[64])[0][0], samples[0])


def test_the_next_token_follows_its_rule_and_rows_of_unequal_length_are_padded() -> None:
    inputs, targets = SyntheticTokens(split="train", noise=0.1).tensors()
    assert float((targets == (5 * inputs + 3) % 64).double().mean()) == pytest.approx(0.9, abs=0.02)
    inputs, targets = SyntheticTokens(split="train", context=8, min_context=3, num_samples=50).tensors()
    assert set((targets >= 0).sum(1).tolist()) == {3, 4, 5, 6, 7, 8}
    assert not inputs[targets < 0].any()


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.shape=\[2, 2\]"):
        Synthetic(split="train", shape=[2, 2])
    with pytest.raises(ConfigError, match=r"data\.min_context=40: larger than data\.context=32"):
        SyntheticTokens(split="train", min_context=40)


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(folder: Path, name: str = "part-0", **columns: Any) -> None:
    file = folder / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def rows(folder: Path, **keys: Any) -> SparkFrame:
    return SparkFrame(**{"split": "train", "path": folder, "target": "y", "val_share": 0.0, **keys})


def test_rows_of_all_files_come_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "day=2/part-0", x=[3.0], v=[[4, 5]], y=[1.5])
    write(tmp_path, "day=1/part-0", x=[1, 2], v=[[2, 3], [4, 5]], y=[0.5, 1.0])
    write(tmp_path, "_temporary/part-0", x=[9], v=[[9, 9]], y=[9.0])
    frame = rows(tmp_path, columns=["v", "x", "day"])
    assert frame.tensors()[0].tolist() == [[2, 3, 1, 1], [4, 5, 2, 1], [4, 5, 3, 2]]
    assert (frame[2][1].item(), frame[2][1].dtype) == (1.5, torch.float32)


def test_each_row_is_in_one_split_and_classes_are_whole(tmp_path: Path) -> None:
    write(tmp_path, x=np.arange(10.0), flag=[True] * 10, price=[decimal.Decimal("1.25")] * 10, y=[0.0, 1.0] * 5)
    node = {"_target_": "trainkit.data.SparkFrame", "path": str(tmp_path), "target": "y", "target_kind": "class"}
    splits = build_splits({**node, "val_share": 0.2})
    assert {name: len(part) for name, part in splits.items()} == {"train": 8, "val": 2}
    assert sorted(sample[0][0].item() for part in splits.values() for sample in part) == [*range(10)]
    assert (splits["val"][0][0][1:].tolist(), splits["val"][0][1].dtype) == ([1.0, 1.25], torch.int64)
    assert SparkFrame.splits({**node, "target": None}) == ("all",)
    assert len(rows(tmp_path, split="all", target=None)[0]) == 1


@pytest.mark.parametrize(
    ("columns", "keys", "rule"),
    [
        ({"x": [1.0, None]}, {}, "column x holds 1 nulls: fill or drop them in Spark."),
        ({"x": ["a", "b"]}, {}, "column x holds string: make numbers of it in Spark, such as by StringIndexer."),
        ({"x": [[1], [2, 3]]}, {}, "column x holds arrays of several lengths: pad them in Spark."),
        ({"x": [1.0, 1e300]}, {}, "column x holds NaN, infinity or a number beyond float32."),
        ({"x": [1, 2]}, {"target": "z"}, "has no column z. Its columns are x, y."),
        ({"x": [1, 2]}, {"target": "x", "columns": ["y"]}, ""),
        ({"x": [0.5, 2]}, {"target": "x", "target_kind": "class"}, "column x holds other numbers than classes"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, columns: dict[str, Any], keys: dict[str, Any], rule: str) -> None:
    write(tmp_path, **columns, y=[0, 1])
    if not rule:
        assert rows(tmp_path, **keys)[1][0].tolist() == [1.0]
        return
    with pytest.raises(DataError, match=rule):
        rows(tmp_path, **keys)


def test_a_folder_without_rows_and_one_with_a_log_of_changes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.parquet\. Write the frame: trainkit\.spark\.save_frame"):
        rows(tmp_path)
    write(tmp_path, x=[1], y=[1])
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(DataError, match="its files also hold rows that were deleted"):
        rows(tmp_path)
    (tmp_path / "_delta_log").rmdir()
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        rows(tmp_path)


def test_packages_that_are_missing_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    install = install_command("spark", "")
    calls: list[Callable[[], object]] = [
        lambda: spark.save_frame(None, tmp_path), lambda: spark.predict_udf("run", input_shape=(1,)),
        lambda: rows(tmp_path),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(MissingExtraError) as caught:
            call()
        assert install in str(caught.value)
