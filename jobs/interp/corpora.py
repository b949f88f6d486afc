"""Text to run models on: the English that every Python carries, or files (`documents`).

`english` is the language reference in `pydoc_data.topics` and the docstrings of the standard library, read
from the source files with `ast` (nothing is imported). About 1.5 million tokens, the same for the same Python
version; its digest is stored with every result. Documents come in the order of their SHA-256, which is fixed
and mixes the topics, so that any part of the corpus resembles the whole.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.interp.documents import Documents, as_bytes, files_of
from jobs.interp.readers import DataFile, Document

BUILT_IN = "english"
#: Shorter docstrings ("Return self.") teach a model's SAE nothing but their own template.
SHORTEST_CHARACTERS = 200


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, to be gone through as often as one likes, and how to know them again."""

    name: str
    documents: Iterable[Document]

    @property
    def sha256(self) -> str:
        """Digest over the documents in order; a zero byte parts them. Reads them all."""
        total = hashlib.sha256()
        for document in self.documents:
            total.update(as_bytes(document))
        return total.hexdigest()


def open_corpus(name: str, *, field: str = "text", split: str = "train") -> Corpus:
    """The built-in corpus `english`, or the file or folder at the path `name`.

    Raises `Unusable` for one that is missing, cannot be read, or holds no document.
    """
    return english() if name == BUILT_IN else of_files(files_of(Path(name), split), Path(name).name, field)


def of_files(files: list[DataFile], name: str, field: str = "text") -> Corpus:
    """The documents of files, read while they are asked for. Raises `Unusable` unless the first one can be read."""
    documents = Documents(files, field)
    documents.first()
    return Corpus(name, documents)


def english() -> Corpus:
    """The built-in corpus: topics of `pydoc` and docstrings of the standard library."""
    texts = {text for text in _built_in_texts() if len(text) >= SHORTEST_CHARACTERS}
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    return Corpus(BUILT_IN, tuple(ordered))


def _built_in_texts() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (text.strip() for _, text in sorted(topics.items()))
    for path in _library_files():
        yield from _docstrings(path)


def _library_files() -> Iterable[Path]:
    """Source files of the standard library proper: no tests, no third-party packages, no grammar tables."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "__pycache__",
    }
    return sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    yield from _documented(tree)


def _documented(node: ast.AST) -> Iterator[str]:
    """Docstrings of a module and of what it defines, nested or in a condition; expressions are not
    entered.
    """
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield (ast.get_docstring(node) or "").strip()
    for part in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, part, None) or ():
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _documented(child)
