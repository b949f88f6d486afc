"""What uploaded files must be, and what can be said of them. Nothing here loads torch or executes what it reads.

corpus   one file: UTF-8 text whose paragraphs (blank lines between) are the documents, JSON Lines, Parquet, or rows of
         tokens in safetensors (`interp.readers`)
sae      SAELens' layout: cfg.json + sae_weights.safetensors (+ sparsity.safetensors), each true to the others
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rest_framework import serializers
from rest_framework.exceptions import ParseError

from gpus import rest
from jobs.interp import extras, readers
from jobs.interp.errors import MissingExtra, Unusable
from jobs.interp.readers import DataFile

Facts = dict[str, Any]
Shapes = dict[str, list[int]]
CONFIG, WEIGHTS, SPARSITY = "cfg.json", "sae_weights.safetensors", "sparsity.safetensors"
#: Configurations are a few KiB; a larger one is something else.
CONFIG_LIMIT_BYTES = 2**20
#: A file may be one single line: it is read in pieces of so many characters.
LINE_PIECE = 2**20
#: Fields of a corpus that its manifest names.
MOST_FIELDS = 100
FLOATS = ("F64", "F32", "F16", "BF16")


def no(sentence: str) -> serializers.ValidationError:
    return serializers.ValidationError({"file": [sentence]})


# Corpora ------------------------------------------------------------------------------------------------
def corpus_names(names: Sequence[str]) -> list[str]:
    found = [Path(name).suffix.lower() for name in names]
    if len(found) != 1 or found[0] not in CORPORA:
        raise no(f"A corpus is one file whose name ends in {', '.join(CORPORA)}.")
    return [f"corpus{found[0]}"]


def corpus(folder: Path) -> Facts:
    """How many documents there are, and what its form adds. Read piece by piece: it may be larger than the memory."""
    [path] = folder.glob("corpus.*")
    try:
        facts = CORPORA[path.suffix](path)
    except UnicodeDecodeError:
        raise no("The file is not UTF-8 text.") from None
    except MissingExtra as error:
        raise rest.ApiError(400, error.reason, str(error), hint=error.hint) from error
    except Unusable as error:
        raise no(str(error).replace(path.name, "The file", 1)) from None
    if not facts["documents"]:
        raise no("The file holds no text.")
    return facts


def plain_text(path: Path) -> Facts:
    documents, characters = counted(lines(path))
    return {"documents": documents, "characters": characters}


def json_lines(path: Path) -> Facts:
    """Objects, and the fields of the first: a job names the one that it reads."""
    documents = 0
    fields: list[str] = []
    for row in readers.objects(DataFile(path, path.name)):
        documents, fields = documents + 1, fields or sorted(row)
    return {"documents": documents, "fields": shown(fields)}


def table(path: Path) -> Facts:
    """Rows and columns. Raises the 400 `missing_extra`."""
    extras.require("tables")
    rows, columns = readers.shape_of_table(DataFile(path, path.name))
    return {"documents": rows, "fields": shown(columns), **tokenizer(path)}


def token_rows(path: Path) -> Facts:
    """Rows of tokens, all of them read once."""
    documents = tokens = 0
    for _, row in readers.pieces(DataFile(path, path.name), ""):
        documents, tokens = documents + 1, tokens + len(row)
    return {"documents": documents, "tokens": tokens, **tokenizer(path)}


def shown(names: list[str]) -> list[str]:
    """Names of fields that a database and a page can take."""
    try:
        rest.check(names)
    except ParseError as error:
        raise no(f"A field's name cannot be stored: {error}") from None
    return [name for name in names if short(name)][:MOST_FIELDS]


def tokenizer(path: Path) -> Facts:
    found = DataFile(path, path.name).tokenizer_sha256
    return {readers.TOKENIZER_KEY: found} if found else {}


#: What a corpus may be, by the ending of its name.
CORPORA: dict[str, Callable[[Path], Facts]] = {
    ".txt": plain_text,
    ".jsonl": json_lines,
    ".parquet": table,
    ".safetensors": token_rows,
}


def lines(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        while line := file.readline(LINE_PIECE):
            if "\0" in line:
                raise no("The file holds NUL characters, so it is not text.")
            yield line


def counted(text: Iterator[str]) -> tuple[int, int]:
    """Paragraphs, parted by blank lines as `interp.corpora` parts them, and characters."""
    documents, characters, blank = 0, 0, True
    for line in text:
        documents += blank and not line.isspace()
        characters += len(line)
        blank = line.isspace()
    return documents, characters


# SAEs ---------------------------------------------------------------------------------------------------
def sae_names(names: Sequence[str]) -> list[str]:
    if sorted(names) not in ([CONFIG, WEIGHTS], [CONFIG, WEIGHTS, SPARSITY]):
        raise no(f"An SAE is {CONFIG} and {WEIGHTS}, with or without {SPARSITY}; nothing else.")
    return list(names)


def sae(folder: Path) -> Facts:
    """Architecture, sizes and place, from a configuration that fits its weights."""
    config, weights = configuration(folder / CONFIG), shapes(folder / WEIGHTS)
    d_in, d_sae = size(config, "d_in"), size(config, "d_sae")
    expect(WEIGHTS, weights, ("W_enc", "W_dec", "b_dec"), expected_shapes(d_in, d_sae))
    if (folder / SPARSITY).exists():
        expect(SPARSITY, shapes(folder / SPARSITY), ("sparsity",), {"sparsity": [d_sae]})
    return words_of(config) | {"d_in": d_in, "d_sae": d_sae}


def expected_shapes(d_in: int, d_sae: int) -> Shapes:
    """Of the tensors that SAELens' architectures share."""
    narrow = {name: [d_sae] for name in ("b_enc", "threshold", "b_gate", "b_mag", "r_mag")}
    return {"W_enc": [d_in, d_sae], "W_dec": [d_sae, d_in], "b_dec": [d_in], **narrow}


def expect(file: str, found: Shapes, needed: Sequence[str], expected: Shapes) -> None:
    if missing := [name for name in needed if name not in found]:
        raise no(f"{file} lacks {', '.join(missing)}.")
    for name in found.keys() & expected.keys():
        if found[name] != expected[name]:
            raise no(f"{name} in {file} is {found[name]}; {CONFIG} makes it {expected[name]}.")


def configuration(path: Path) -> Facts:
    """`cfg.json` as an object that a database can store."""
    if path.stat().st_size > CONFIG_LIMIT_BYTES:
        raise no(f"{CONFIG} is larger than {CONFIG_LIMIT_BYTES // 2**20} MiB.")
    try:
        config = json.loads(path.read_bytes().decode("utf-8"))
        rest.check(config)
    except (ValueError, RecursionError, ParseError) as error:
        raise no(f"{CONFIG} is not JSON as it should be: {error}") from None
    if not isinstance(config, dict):
        raise no(f"{CONFIG} is not a JSON object.")
    return config


def size(config: Facts, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise no(f"{CONFIG} has no whole number {name}.")
    return value


def words_of(config: Facts) -> Facts:
    """Texts and numbers that pages and kinds show, under the names that our own SAEs have."""
    about = config.get("metadata") if isinstance(config.get("metadata"), dict) else {}
    merged = config | (about or {})
    facts = {
        "architecture": config.get("architecture"),
        "k": config.get("k"),
        "site": merged.get("hook_name"),
        "model_name": merged.get("model_name"),
    }
    return {name: value for name, value in facts.items() if short(value)}


def short(value: Any) -> bool:
    return (isinstance(value, str) and 0 < len(value) <= 200) or type(value) is int


def shapes(path: Path) -> Shapes:
    """Shape of every tensor of a safetensors file, whose header the library checks against its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            odd = [name for name, part in slices.items() if part.get_dtype() not in FLOATS]
            found = {name: part.get_shape() for name, part in slices.items()}
    except SafetensorError as error:
        raise no(f"{path.name} is not a safetensors file: {error}.") from None
    if odd:
        raise no(f"{odd[0]} in {path.name} is not of a floating point type.")
    return found


# Both ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Type:
    """How files of one type are named on disk, and what reads and refuses them once they lie there."""

    names: Callable[[Sequence[str]], list[str]]
    facts: Callable[[Path], Facts]


TYPES = {"corpus": Type(corpus_names, corpus), "sae": Type(sae_names, sae)}
