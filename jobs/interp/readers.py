"""Files that hold documents, read piece by piece: memory does not grow with the file. Plain Python, no torch.

    .txt and unknown names   UTF-8; paragraphs (blank lines between) are the documents
    .jsonl                   an object per line; one of its fields is the document
    .parquet                 a table; one of its columns is the document (needs pyarrow)
    .arrow                   the same, as `datasets.save_to_disk` writes it (needs pyarrow)
    .safetensors             rows of tokens: `input_ids` [rows, length] (with or without `attention_mask`), or `ids`
                             [n] and `lengths` [rows]

What a document is follows from its value: text; token ids, taken as they are; or messages (`role`, `content`), which
the model's chat template writes out. Empty ones are passed over.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.interp.errors import NoField, Unusable

#: Text; or the ids of its tokens; or the messages of a conversation.
Document = str | list[int] | list[dict[str, Any]]
#: How much of a file has been read, 0 to 1, and what came.
Piece = tuple[float, Document]
#: A paragraph longer than this many characters is parted, so that no file has to fit into memory.
PARAGRAPH_CHARACTERS = 2**20
#: A line of JSON that is longer is no document of anybody's.
LINE_BYTES = 64 * 2**20
#: Rows of a table in memory at a time.
TABLE_ROWS = 256
#: Types of whole numbers in safetensors.
WHOLE = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")
#: Under which name a file says which tokenizer its tokens come from (`models.describe`).
TOKENIZER_KEY = "tokenizer_sha256"


@dataclass(frozen=True)
class DataFile:
    """A file and how it is read; its path may be that of a nameless copy in a cache.

    One that lies elsewhere has `fetch`, which brings it when its turn comes, and its `size_bytes`.
    """

    path: Path
    name: str
    size_bytes: int | None = None
    fetch: Callable[[], Path] | None = None

    def here(self) -> DataFile:
        """The same file on this machine."""
        return replace(self, path=self.fetch(), fetch=None) if self.fetch else self

    @property
    def form(self) -> str:
        suffix = Path(self.name).suffix.lower()
        suffix = {".json": ".jsonl", ".ndjson": ".jsonl"}.get(suffix, suffix)
        return suffix if suffix in READERS else ".txt"

    @property
    def tokenizer_sha256(self) -> str:
        """The digest of the tokenizer that the file says its tokens come from, or empty."""
        return str(_metadata(self).get(TOKENIZER_KEY, ""))


# Reading ------------------------------------------------------------------------------------------------
def pieces(file: DataFile, field: str) -> Iterator[Piece]:
    """What a file holds, every way of being unreadable told in a sentence."""
    try:
        file = file.here()
        yield from READERS[file.form](file, field)
    except UnicodeDecodeError as error:
        raise Unusable(f"{file.name} cannot be read as UTF-8 text: {error}.") from error
    except (OSError, ValueError) as error:  # pyarrow's and safetensors' own errors are ValueErrors or wrapped
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"{file.name} cannot be read: {_words(error)}.") from error


def _words(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words.strip().rstrip(".")[:300]


def size_of(file: DataFile) -> int:
    try:
        return file.path.stat().st_size if file.size_bytes is None else file.size_bytes
    except OSError:
        return 0  # told when it is opened


def _paragraphs(file: DataFile, _field: str) -> Iterator[Piece]:
    size = max(1, size_of(file))
    with open(file.path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as text:
        for paragraph in _parted(iter(lambda: text.readline(PARAGRAPH_CHARACTERS), "")):
            yield min(1.0, raw.tell() / size), paragraph


def _parted(lines: Iterator[str]) -> Iterator[str]:
    """Paragraphs of lines, blank lines between; very long ones in parts."""
    held: list[str] = []
    characters = 0
    for line in lines:
        if line.isspace() or characters + len(line) > PARAGRAPH_CHARACTERS:
            yield from _stripped(held)
            held, characters = [], 0
        held.append(line)
        characters += len(line)
    yield from _stripped(held)


def _stripped(lines: list[str]) -> Iterator[str]:
    if text := "".join(lines).strip():
        yield text


def objects(file: DataFile) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON Lines. Raises `Unusable` naming the line that is none."""
    for _, _, row in _numbered_objects(file):
        yield row


def _json_lines(file: DataFile, field: str) -> Iterator[Piece]:
    for number, share, row in _numbered_objects(file):
        if field not in row:
            raise NoField(f"Line {number} of {file.name} has no field {field!r}; it has {_listed(row)}.")
        document = document_of(row[field], f"{field!r} in line {number} of {file.name}")
        if document is not None:
            yield share, document


def _numbered_objects(file: DataFile) -> Iterator[tuple[int, float, dict[str, Any]]]:
    size, done = max(1, size_of(file)), 0
    with open(file.path, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), b""), 1):
            done += len(line)
            if not line.isspace():
                yield number, done / size, _object(line, number, file.name)


def _object(line: bytes, number: int, name: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise Unusable(f"Line {number} of {name} is nested too deeply.") from error
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise Unusable(f"Line {number} of {name} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise Unusable(f"Line {number} of {name} is not a JSON object.")
    return row


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"


def _table(file: DataFile, field: str) -> Iterator[Piece]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path, memory_map=True, pre_buffer=False) as table:
        _require_column(table.schema_arrow.names, field, file)
        batches = table.iter_batches(batch_size=TABLE_ROWS, columns=[field])
        yield from _cells(file, field, batches, table.metadata.num_rows)


def shape_of_table(file: DataFile) -> tuple[int, list[str]]:
    """Rows and columns of a Parquet file. Raises `Unusable` for what is none."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            return table.metadata.num_rows, list(table.schema_arrow.names)
    except (OSError, ValueError) as error:
        raise Unusable(f"{file.name} cannot be read: {_words(error)}.") from error


def _arrow(file: DataFile, field: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(file.path)) as source, pyarrow.ipc.open_stream(source) as table:
        _require_column(table.schema.names, field, file)
        for batch in table:
            share = source.tell() / max(1, source.size())
            for _, document in _cells(file, field, _sliced(batch.select([field])), batch.num_rows):
                yield share, document


def _sliced(batch: Any) -> Iterator[Any]:
    for first in range(0, batch.num_rows, TABLE_ROWS):
        yield batch.slice(first, TABLE_ROWS)


def _cells(file: DataFile, field: str, batches: Iterable[Any], rows: int) -> Iterator[Piece]:
    done = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            done += 1
            document = document_of(value, f"{field!r} in row {done} of {file.name}")
            if document is not None:
                yield done / max(1, rows), document


def _require_column(names: Iterable[str], field: str, file: DataFile) -> None:
    if field not in names:
        raise NoField(f"{file.name} has no column {field!r}; it has {_listed(names)}.")


def _token_rows(file: DataFile, _field: str) -> Iterator[Piece]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file.path, framework="numpy") as tensors:
            names = set(tensors.keys())
            if "input_ids" in names:
                yield from _square(tensors, "attention_mask" in names, file.name)
            elif {"ids", "lengths"} <= names:
                yield from _ragged(tensors, file.name)
            else:
                raise Unusable(
                    f"{file.name} holds {_listed(names)}; rows of tokens are input_ids, or ids and lengths."
                )
    except SafetensorError as error:
        raise Unusable(f"{file.name} is not a safetensors file: {error}.") from error


def _square(tensors: Any, masked: bool, file: str) -> Iterator[Piece]:
    ids = _slice(tensors, "input_ids", 2, file)
    mask = _slice(tensors, "attention_mask", 2, file, (*WHOLE, "BOOL")) if masked else None
    shape = ids.get_shape()
    if mask is not None and mask.get_shape() != shape:
        raise Unusable(
            f"In {file} input_ids is {shape} and attention_mask {mask.get_shape()}; both have to be of one shape."
        )
    rows = shape[0]
    for first in range(0, rows, TABLE_ROWS):
        last = min(first + TABLE_ROWS, rows)
        part = ids[first:last]
        real = mask[first:last].astype(bool) if mask is not None else [slice(None)] * len(part)
        for number, (row, kept) in enumerate(zip(part, real, strict=True), first + 1):
            if tokens := row[kept].tolist():
                yield number / rows, tokens


def _ragged(tensors: Any, file: str) -> Iterator[Piece]:
    ids, lengths = _slice(tensors, "ids", 1, file), _slice(tensors, "lengths", 1, file)[:].tolist()
    held, shortest = ids.get_shape()[0], min(lengths, default=0)
    if shortest < 0:
        raise Unusable(f"In {file} a row has the length {shortest}.")
    if sum(lengths) != held:
        raise Unusable(f"In {file} the lengths add up to {sum(lengths)}, and ids holds {held} tokens.")
    first = 0
    for number, length in enumerate(lengths, 1):
        if length:
            yield number / len(lengths), ids[first : first + length].tolist()
        first += length


def _slice(tensors: Any, name: str, dimensions: int, file: str, types: Container[str] = WHOLE) -> Any:
    """A tensor to be read in parts. Raises `Unusable` for one of another type or number of dimensions."""
    found = tensors.get_slice(name)
    shape, dtype = found.get_shape(), found.get_dtype()
    if dtype not in types or len(shape) != dimensions:
        wanted = "rows by length" if dimensions == 2 else "one dimension"
        raise Unusable(f"{name} of {file} is {dtype} {shape}; it has to be whole numbers, {wanted}.")
    return found


Reader = Callable[[DataFile, str], Iterator[Piece]]
READERS: dict[str, Reader] = {
    ".txt": _paragraphs,
    ".jsonl": _json_lines,
    ".parquet": _table,
    ".arrow": _arrow,
    ".safetensors": _token_rows,
}


# What a file says of itself -----------------------------------------------------------------------------
def _metadata(file: DataFile) -> Mapping[str, Any]:
    """The words in the header of a safetensors or Parquet file; others have none."""
    if file.form == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file.path, framework="numpy") as tensors:
                return tensors.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise Unusable(f"{file.name} is not a safetensors file: {error}.") from error
    if file.form != ".parquet":
        return {}
    import pyarrow.parquet

    try:
        words = pyarrow.parquet.read_schema(file.path).metadata or {}
    except (OSError, ValueError) as error:
        raise Unusable(f"{file.name} cannot be read: {_words(error)}.") from error
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in words.items()}


# What a value is ----------------------------------------------------------------------------------------
def document_of(value: Any, where: str) -> Document | None:
    """The document that a field's value is; None for an empty one. Raises `Unusable` for anything else."""
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return _sound(value, where)
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if isinstance(value, list) and all(_is_message(item) for item in value):
        return value
    raise Unusable(f"{where} is neither text, nor token ids, nor messages with role and content.")


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item


def _sound(text: str, where: str) -> str:
    """JSON can spell half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(f"{where} holds half a character (a lone surrogate).") from error
    return text
