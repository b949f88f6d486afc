"""The shards of an extraction on disk: written whole or not at all, known again, thrown away.

    tokens/shard_00000.safetensors                    ids, lengths, documents of the rows; kept, per token
    blocks.4.hook_resid_post/shard_00000.safetensors  acts [n, d_model]; norms, ids, document, row, position [n]

The texts of a shard are written last: their presence says that the vectors of every site are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from jobs.interp.errors import NonFinite, Unusable
from jobs.interp.files import write_tensors
from jobs.interp.site import Site
from jobs.interp.tokens import Row


class Vectors:
    """What one site keeps of a shard's rows, which come in any order: vectors as they are stored, and their lengths."""

    def __init__(self, rows: int) -> None:
        self.acts: list[Tensor] = [torch.empty(0)] * rows  # each [kept, d_model]
        self.norms: list[Tensor] = [torch.empty(0)] * rows  # each [kept] float32

    def put(self, indexes: Sequence[int], counts: Sequence[int], values: Tensor, dtype: torch.dtype) -> None:
        """The kept vectors of some rows. Shapes: values `[sum of counts, d_model]`, on any device."""
        norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32).cpu()
        stored = values.to(dtype).cpu()
        for index, acts, lengths in zip(indexes, stored.split(counts), norms.split(counts), strict=True):
            self.acts[index], self.norms[index] = acts, lengths


class Shard:
    """Consecutive rows of the corpus and what is kept of them."""

    def __init__(self, folder: Path, number: int, rows: Sequence[Row], sites: Sequence[Site]) -> None:
        self.folder, self.number, self.rows = folder, number, rows
        self.keep: list[Tensor] = [torch.empty(0)] * len(rows)  # each [tokens] bool
        self.sites = {site: Vectors(len(rows)) for site in sites}

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.rows)

    @property
    def kept(self) -> int:
        return sum(int(chosen.sum()) for chosen in self.keep)

    def is_made(self) -> bool:
        """Whether the disk holds this shard, made of these very rows."""
        path = path_of(self.folder / "tokens", self.number)
        if not path.exists():
            return False
        held = load_file(path)
        return all(torch.equal(held[name], tensor) for name, tensor in self._texts().items())

    def write(self, dtype: str) -> None:
        """Raises `Unusable` for vectors that `dtype` cannot hold, `NonFinite` for those that are not numbers."""
        path_of(self.folder / "tokens", self.number).unlink(missing_ok=True)
        for site, vectors in self.sites.items():
            self._write_site(site, torch.cat(vectors.acts), torch.cat(vectors.norms), dtype)
            vectors.acts.clear()  # or all sites would lie in memory until the last is written
        texts = self._texts() | {"kept": torch.cat(self.keep).to(torch.uint8)}
        write_tensors(path_of(self.folder / "tokens", self.number), texts)

    def _write_site(self, site: Site, acts: Tensor, norms: Tensor, dtype: str) -> None:
        if not torch.isfinite(acts).all():
            explain_non_finite(norms, dtype, site.hook_name)
        counts = torch.tensor([int(chosen.sum()) for chosen in self.keep])
        rows = torch.arange(len(self.rows), dtype=torch.int32)
        pairs = list(zip(self.rows, self.keep, strict=True))
        tensors = {
            "acts": acts,
            "norms": norms,
            "ids": torch.cat([_ids(row)[chosen] for row, chosen in pairs]),
            "document": torch.repeat_interleave(self._documents(), counts),
            "row": torch.repeat_interleave(rows, counts),
            "position": torch.cat([chosen.nonzero().flatten().int() for chosen in self.keep]),
        }
        write_tensors(path_of(self.folder / site.hook_name, self.number), tensors)

    def _texts(self) -> dict[str, Tensor]:
        return {
            "ids": torch.cat([_ids(row) for row in self.rows]),
            "lengths": torch.tensor([len(row.ids) for row in self.rows], dtype=torch.int32),
            "documents": self._documents(),
        }

    def _documents(self) -> Tensor:
        return torch.tensor([row.document for row in self.rows], dtype=torch.int32)


def explain_non_finite(norms: Tensor, dtype: str, site: str) -> None:
    """Raise what is the matter with vectors that are not finite once they are stored."""
    if torch.isfinite(norms).all():
        raise Unusable(
            f"{site} has vectors of length {norms.max():.3g}, more than {dtype} can hold; use bfloat16 or float32."
        )
    raise NonFinite(f"The model gave values that are not finite at {site}.")


def path_of(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def by_number(path: Path) -> tuple[int, str]:
    """The order of shards: names have five digits, and more from 100 000 on, where the alphabet goes wrong."""
    return len(path.name), path.name


def forget_from(folder: Path, number: int) -> None:
    """Remove shards that an earlier attempt made beyond the last one of this corpus; texts first."""
    for place in (folder / "tokens", *folder.glob("blocks.*")):
        for path in place.glob("shard_*.safetensors"):
            if by_number(path) >= by_number(path_of(place, number)):
                path.unlink()


def _ids(row: Row) -> Tensor:
    return torch.tensor(row.ids, dtype=torch.int32)
