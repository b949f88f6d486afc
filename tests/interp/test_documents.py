"""Files of documents: every form, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from jobs.interp import documents, readers
from jobs.interp.documents import Documents, files_of, of_split
from jobs.interp.errors import NoField, Unusable
from jobs.interp.readers import DataFile

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def read(path: Path, field: str = "text") -> list[Any]:
    return list(Documents(files_of(path), field))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


# Text ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_text_is_read_as_paragraphs(tmp_path: Path, ending: str) -> None:
    text = ending.join(["", " a", "b ", "", "\t", "c", "", ""])
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == ["a\nb", "c"]


def test_a_paragraph_without_end_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PARAGRAPH_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("x" * 25 + "\nab\ncd\n\nef")
    found = read(tmp_path / "a.txt")
    assert "".join(found).replace("\n", "") == "x" * 25 + "abcdef"
    assert max(map(len, found)) <= 10
    assert found[-1] == "ef"


def test_they_can_be_gone_through_again_and_tell_how_far_they_are(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        lines(tmp_path / "data" / name, *({"text": f"{name} {n}"} for n in range(4)))
    found = Documents(files_of(tmp_path / "data"))
    shares = [(document, found.share) for document in found]
    assert [document for document, _ in shares] == [f"{n}.jsonl {i}" for n in "ab" for i in range(4)]
    assert [share for _, share in shares] == pytest.approx([n / 8 for n in range(1, 9)])
    assert len(list(found)) == 8


# JSON Lines ---------------------------------------------------------------------------------------------
def test_a_field_is_text_or_tokens_or_messages(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "input_ids": [1, 2], "messages": MESSAGES},
        {"text": " ", "input_ids": [], "messages": None},
    ]
    path = lines(tmp_path / "a.jsonl", *rows, "\n")
    assert read(path) == ["a"]
    assert read(path, "input_ids") == [[1, 2]]
    assert read(path, "messages") == [MESSAGES]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"body": "x", "id": 3}, "Line 2 of a.jsonl has no field 'text'; it has body, id"),
        ("[1]\n", "Line 2 of a.jsonl is not a JSON object"),
        ("{\n", "Line 2 of a.jsonl is not JSON"),
        ("[" * 100_000 + "\n", "Line 2 of a.jsonl is nested too deeply"),
        ({"text": 3}, "'text' in line 2 of a.jsonl is neither text, nor token ids, nor messages"),
        ({"text": [1, True]}, "neither text"),
        ({"text": [{"content": "x"}]}, "neither text"),
        ('{"text": "\\ud800"}\n', "half a character"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(Unusable, match=words):
        read(lines(tmp_path / "a.jsonl", {"text": "good"}, row))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(Unusable, match=r"a\.jsonl cannot be read as UTF-8"):
        read(tmp_path / "a.jsonl")


def test_a_missing_field_is_an_error_of_the_field(tmp_path: Path) -> None:
    with pytest.raises(NoField):
        read(lines(tmp_path / "a.jsonl", {"a": "x"}))


# Tokens -------------------------------------------------------------------------------------------------
def test_rows_of_tokens_are_read_with_and_without_mask(tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]])
    save_file(
        {"input_ids": ids, "attention_mask": mask}, tmp_path / "a.safetensors", {"tokenizer_sha256": "abc"}
    )
    assert read(tmp_path / "a.safetensors") == [[0, 1, 2, 3], [6, 7], [8, 9, 10]]
    assert Documents(files_of(tmp_path / "a.safetensors")).tokenizer_sha256 == "abc"
    save_file({"input_ids": ids}, tmp_path / "b.safetensors")
    assert read(tmp_path / "b.safetensors") == ids.tolist()


def test_the_texts_of_an_extraction_are_a_corpus(tmp_path: Path) -> None:
    flat = {"ids": np.arange(5, dtype=np.int32), "lengths": np.array([2, 0, 3], dtype=np.int32)}
    save_file(flat, tmp_path / "a.safetensors")
    assert read(tmp_path / "a.safetensors") == [[0, 1], [2, 3, 4]]


IDS = np.arange(12, dtype=np.int32).reshape(3, 4)
FLAT = np.arange(5, dtype=np.uint16)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"input_ids": FLAT}, r"input_ids of a\.safetensors is U16 \[5\]; .* whole numbers, rows by length"),
        ({"input_ids": np.array(3)}, r"is I64 \[\]"),
        ({"input_ids": IDS.astype("f4")}, r"is F32 \[3, 4\]"),
        ({"input_ids": IDS > 0}, r"is BOOL \[3, 4\]"),
        ({"input_ids": IDS, "attention_mask": FLAT}, r"attention_mask of a\.safetensors is U16 \[5\]"),
        (
            {"input_ids": IDS, "attention_mask": np.ones((3, 3), bool)},
            r"is \[3, 4\] and attention_mask \[3, 3\]",
        ),
        ({"ids": IDS, "lengths": np.array([12])}, r"ids of a\.safetensors is I32 \[3, 4\]; .* one dimension"),
        ({"ids": FLAT.astype("f8"), "lengths": np.array([5])}, r"is F64 \[5\]"),
        ({"ids": FLAT, "lengths": np.array([2.0, 3.0])}, r"lengths of a\.safetensors is F64 \[2\]"),
        ({"ids": FLAT, "lengths": np.array([[2, 3]])}, r"is I64 \[1, 2\]"),
        ({"ids": FLAT, "lengths": np.array([8, -3])}, "a row has the length -3"),
        ({"ids": FLAT, "lengths": np.array([2, 4])}, "lengths add up to 6, and ids holds 5 tokens"),
    ],
)
def test_rows_of_tokens_of_another_form_are_refused_in_words(
    tmp_path: Path, tensors: dict[str, np.ndarray], words: str
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(Unusable, match=words):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", ["i1", "i8", "u1", "u2", "u4", "u8"])
def test_tokens_may_be_of_every_type_of_whole_numbers(tmp_path: Path, dtype: str) -> None:
    save_file({"input_ids": IDS.astype(dtype), "attention_mask": IDS > 5}, tmp_path / "a.safetensors")
    assert read(tmp_path / "a.safetensors") == [[6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("content", [b"\xff" * 64, b""])
def test_what_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(Unusable, match=r"a\.safetensors is not a safetensors file"):
        read(tmp_path / "a.safetensors")
    save_file({"acts": np.zeros(3, "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(Unusable, match="holds acts; rows of tokens are input_ids"):
        read(tmp_path / "a.safetensors")


def test_files_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        ids = {"input_ids": np.zeros((1, 2), "i4")}
        save_file(ids, tmp_path / f"{name}.safetensors", {"tokenizer_sha256": name})
    with pytest.raises(Unusable, match="different tokenizers"):
        _ = Documents(files_of(tmp_path)).tokenizer_sha256


# Tables (with pyarrow) ----------------------------------------------------------------------------------
def table(**columns: Any) -> Any:
    return pyarrow.table(columns)


def test_a_column_of_a_parquet_file_is_read(tmp_path: Path) -> None:
    made = table(
        text=["a", None, "", "b"], input_ids=[[1, 2], [3], None, [4]], messages=[MESSAGES, None, [], MESSAGES]
    )
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        made.replace_schema_metadata({"tokenizer_sha256": "abc"}), tmp_path / "a.parquet"
    )
    assert read(tmp_path / "a.parquet") == ["a", "b"]
    assert read(tmp_path / "a.parquet", "input_ids") == [[1, 2], [3], [4]]
    assert read(tmp_path / "a.parquet", "messages") == [MESSAGES, MESSAGES]
    assert Documents(files_of(tmp_path / "a.parquet")).tokenizer_sha256 == "abc"
    with pytest.raises(NoField, match=r"a\.parquet has no column 'body'; it has input_ids, messages, text"):
        read(tmp_path / "a.parquet", "body")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(Unusable, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


def saved_to_disk(folder: Path, *texts: str, files: int = 2) -> None:
    """What `datasets.save_to_disk` writes."""
    import pyarrow.ipc

    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for number, name in enumerate(names):
        part = table(text=list(texts[number::files]))
        with pyarrow.ipc.new_stream(str(folder / name), part.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_data_set_is_read_split_by_split(tmp_path: Path) -> None:
    table(text=["x"])
    saved_to_disk(tmp_path / "one", "a", "b", "c")
    assert read(tmp_path / "one") == ["a", "c", "b"]
    saved_to_disk(tmp_path / "set" / "train", "t", files=1)
    saved_to_disk(tmp_path / "set" / "test", "e", files=1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(Documents(files_of(tmp_path / "set", "test"))) == ["e"]
    with pytest.raises(Unusable, match="no split 'dev'; it has train, test"):
        files_of(tmp_path / "set", "dev")


@pytest.mark.oracle
def test_what_the_library_itself_saved_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    made = library.Dataset(
        library.table.InMemoryTable(table(text=["a", "b"], messages=[MESSAGES] * 2)), fingerprint="x"
    )
    library.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "set"))
    made.to_parquet(str(tmp_path / "a.parquet"))
    for path in (tmp_path / "set", tmp_path / "a.parquet"):
        assert (read(path), read(path, "messages")) == (["a", "b"], [MESSAGES] * 2)


def test_a_saved_data_set_names_no_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    assert [file.path for file in files_of(tmp_path)] == [tmp_path / "passwd"]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[1]",
        "not json",
        '"\\ud800',
        "[" * 100_000,
        '{"splits": 3, "_data_files": 3}',
        '{"splits": "train", "_data_files": ["a"]}',
        '{"splits": [1], "_data_files": [{"name": "a"}]}',
        '{"splits": [], "_data_files": []}',
        '{"splits": ["a\\u0000"], "_data_files": [{"filename": "a\\u0000"}]}',
    ],
)
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_file_that_is_only_called_like_those_of_a_saved_data_set_is_passed_over(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert read(tmp_path) == ["x"]


def test_tables_need_pyarrow() -> None:
    assert documents.needs_pyarrow([DataFile(Path("a"), "A.PARQUET")])
    assert not documents.needs_pyarrow([DataFile(Path("a"), "a.jsonl")])


# Folders ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["data/train-00000.parquet", "data/test-00000.parquet"], "train", ["data/train-00000.parquet"]),
        (["train/a.jsonl", "train/b.jsonl", "dev/a.jsonl"], "dev", ["dev/a.jsonl"]),
        (["a.parquet", "b.parquet", "README.txt"], "train", ["a.parquet", "b.parquet"]),
        (["training.txt", ".git/x.txt"], "train", ["training.txt"]),
    ],
)
def test_the_files_of_a_split_are_told_by_their_names(names: list[str], split: str, found: list[str]) -> None:
    assert of_split(names, split, "set") == found


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["test-0.parquet"], "no split 'train'; it has test"),
        (["a.bin"], "holds no Parquet"),
        ([], "holds no"),
    ],
)
def test_a_folder_without_the_split_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(Unusable, match=words):
        of_split(names, "train", "set")


def test_a_folder_that_is_a_whole_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("x")
    with pytest.raises(Unusable, match="more than 3 files"):
        files_of(tmp_path)
