"""A tiny model and a text in a folder that jobs may read, and a shelf for what kinds make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interp.conftest import LETTERS, language_model
from tests.kinds.fake import Shelf


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def import_root(tmp_path: Path, settings: Any) -> Path:
    """A folder with the model `ll` and `text.txt`, 60 paragraphs of pseudo-words."""
    root = tmp_path / "import"
    model = language_model("LL")
    model.model.save_pretrained(root / "LL")
    model.tokenizer.save_pretrained(root / "LL")
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(0, len(LETTERS), (60, 40), generator=draw)
    (root / "text.txt").write_text("\n\n".join("x" + "".join(LETTERS[i] for i in row) for row in letters))
    settings.MISTUDIO_IMPORT_ROOTS = [root]
    return root


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")
