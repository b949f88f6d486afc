"""Text to run models on: the English that every Python carries, or a file.

`english` is the language reference in `pydoc_data.topics` and the docstrings of the standard library, read
from the source files with `ast` (nothing is imported). About 1.5 million tokens, the same for the same Python
version; its digest is stored with every result. Documents come in the order of their SHA-256, which is fixed
and mixes the topics, so that any part of the corpus resembles the whole.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.interp.errors import Unusable

BUILT_IN = "english"
#: Shorter docstrings ("Return self.") teach a model's SAE nothing but their own template.
SHORTEST_CHARACTERS = 200


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and how to make sure that they are the same ones next time."""

    name: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest over the documents in order; a zero byte parts them."""
        total = hashlib.sha256()
        for document in self.documents:
            total.update(document.encode() + b"\0")
        return total.hexdigest()


def open_corpus(name: str) -> Corpus:
    """The built-in corpus `english`, or the text file at the path `name`.

    Raises `Unusable` for a file that is missing, not UTF-8 or without text.
    """
    return english() if name == BUILT_IN else text_file(Path(name))


def english() -> Corpus:
    """The built-in corpus: topics of `pydoc` and docstrings of the standard library."""
    documents = {text for text in _built_in_texts() if len(text) >= SHORTEST_CHARACTERS}
    return Corpus(BUILT_IN, tuple(sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())))


def text_file(path: Path, name: str = "") -> Corpus:
    """Paragraphs of a UTF-8 text file, parted by blank lines, in the order of the file."""
    name = name or path.name
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{name} cannot be read as UTF-8 text: {error}.") from error
    documents = tuple(part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())
    if not documents:
        raise Unusable(f"{name} holds no text.")
    return Corpus(name, documents)


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
