"""The built-in corpus and text files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.interp import corpora
from jobs.interp.errors import Unusable


@pytest.fixture(scope="module")
def english() -> corpora.Corpus:
    return corpora.open_corpus("english")


def test_english_is_large_and_without_doubles(english: corpora.Corpus) -> None:
    assert sum(map(len, english.documents)) > 1_000_000
    assert len(set(english.documents)) == len(english.documents) > 1500
    assert min(map(len, english.documents)) >= corpora.SHORTEST_CHARACTERS


def test_english_is_the_same_each_time(english: corpora.Corpus) -> None:
    again = corpora.english()
    assert again.documents == english.documents
    assert again.sha256 == english.sha256


def test_its_documents_come_mixed(english: corpora.Corpus) -> None:
    from pydoc_data.topics import topics

    reference = {text.strip() for text in topics.values()}
    half = len(english.documents) // 2
    first = sum(text in reference for text in english.documents[:half])
    assert 0.3 < first / sum(text in reference for text in english.documents) < 0.7


def test_docstrings_inside_conditions_are_found(tmp_path: Path) -> None:
    source = '"""A."""\nif 1:\n    class B:\n        """B."""\n        def c(self):\n            """C."""\n'
    (tmp_path / "m.py").write_text(source)
    assert list(corpora._docstrings(tmp_path / "m.py")) == ["A.", "B.", "C."]


def test_a_text_file_is_its_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One\nline.\n\n  \nTwo.\n\n\n")
    corpus = corpora.open_corpus(str(tmp_path / "a.txt"))
    assert list(corpus.documents) == ["One\nline.", "Two."]
    assert corpus.name == "a.txt"


@pytest.mark.parametrize("content", [b"", b"  \n\n ", b"\xff\xfe\x00"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(Unusable, match=r"a\.txt"):
        corpora.open_corpus(str(tmp_path / "a.txt"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be read"):
        corpora.open_corpus(str(tmp_path / "none.txt"))
