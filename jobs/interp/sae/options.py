"""What makes one architecture differ from another, in plain Python: no torch, so that a form can be checked with it.

standard               ReLU, L1 weighted by the length of each direction    Bricken et al. 2023, April update 2024
topk                   the k largest of each token                          Gao et al. 2024 (arXiv 2406.04093)
batchtopk              the k * batch largest of a batch                     Bussmann et al. 2024 (arXiv 2412.06410)
matryoshka_batchtopk   the same, every prefix a dictionary by itself        Bussmann et al. 2025 (arXiv 2503.17547)
jumprelu               a learned threshold for each latent, L0 penalty      Rajamanoharan et al. 2024 (arXiv 2407.14435)
gated                  one path says which latents, another how much        Rajamanoharan et al. 2024 (arXiv 2404.16014)
transcoder             from one site to another, ReLU and L1                Dunefsky et al. 2024 (arXiv 2406.11944)
skip_transcoder        the same with a linear path beside                   Paulo et al. 2025 (arXiv 2501.18823)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from jobs.interp.errors import Unusable

#: Names as SAELens has them, for training; what each is exported as is its class's affair.
NAMES = (
    "topk",
    "batchtopk",
    "matryoshka_batchtopk",
    "jumprelu",
    "standard",
    "gated",
    "transcoder",
    "skip_transcoder",
)
#: Those with a number of live latents, and with AuxK against dead ones.
WITH_K = ("topk", "batchtopk", "matryoshka_batchtopk")
#: Those with an L1 coefficient.
WITH_L1 = ("standard", "gated", "transcoder", "skip_transcoder")
#: Those that need pairs: an input and a target of another site.
TRANSCODERS = ("transcoder", "skip_transcoder")


@dataclass(frozen=True)
class Options:
    """Fields that an architecture has no use for are ignored.

    `k`: live latents per token, on average over a batch for batchtopk. `l1`, `l0`: full weight of the sparsity term,
    after warm-up. `bandwidth`: width of the kernel around a JumpReLU threshold, in pre-activations. `target_l0`: live
    latents per token that JumpReLU thresholds start with. `widths`: Matryoshka's prefixes, ascending, the last one
    d_sae; empty: a sixteenth, an eighth, a quarter, half and all.
    """

    architecture: str = "topk"
    k: float = 32
    l1: float = 5.0
    l0: float = 1.0
    bandwidth: float = 0.05
    target_l0: float = 64.0
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in NAMES:
            raise Unusable(f"There is no architecture {self.architecture!r}; there are {', '.join(NAMES)}.")
        for name in ("l1", "l0"):
            if getattr(self, name) < 0:
                raise Unusable(f"{name} is {getattr(self, name):g}; a weight of 0 or more is needed.")
        if self.bandwidth <= 0:
            raise Unusable(f"bandwidth is {self.bandwidth:g}; it has to be above 0, usually 0.01 to 0.1.")

    @property
    def sparsity(self) -> float:
        """Full weight of the sparsity term; 0 where k alone makes the code sparse."""
        if self.architecture in WITH_L1:
            return self.l1
        return self.l0 if self.architecture == "jumprelu" else 0.0

    @property
    def has_aux(self) -> bool:
        """Whether dead latents are revived by AuxK."""
        return self.architecture in WITH_K

    def prefixes(self, d_sae: int) -> tuple[int, ...]:
        """Matryoshka's widths, the last one `d_sae`."""
        if not self.widths:
            return tuple(sorted({max(1, d_sae // share) for share in (16, 8, 4, 2, 1)}))
        return self.widths if self.widths[-1] == d_sae else (*self.widths, d_sae)

    def check(self, d_in: int, d_out: int, d_sae: int) -> None:
        """Raises `Unusable` with numbers and remedy where these shapes do not allow these options."""
        if self.architecture not in TRANSCODERS and d_in != d_out:
            raise Unusable(
                f"An autoencoder gives back its input, but the input has {d_in} dimensions and the target {d_out}; "
                f"{' or '.join(TRANSCODERS)} takes pairs."
            )
        for needed, check in _CHECKS.items():
            if self.architecture in needed:
                check(self, d_sae)


def _check_k(options: Options, d_sae: int) -> None:
    if not 1 <= options.k <= d_sae:
        raise Unusable(f"k is {options.k:g}, but {d_sae} latents allow 1 to {d_sae}.")
    if options.architecture == "topk" and options.k != int(options.k):
        raise Unusable(f"k is {options.k:g}; topk takes a whole number, batchtopk any.")


def _check_target(options: Options, d_sae: int) -> None:
    if not 0 < options.target_l0 < d_sae:
        raise Unusable(
            f"target_l0 is {options.target_l0:g} live latents per token; {d_sae} latents allow more than 0 and "
            f"less than {d_sae}."
        )


def _check_widths(options: Options, d_sae: int) -> None:
    widths = options.prefixes(d_sae)
    if widths[0] < 1 or any(a >= b for a, b in pairwise(widths)):
        said = ", ".join(map(str, widths))
        raise Unusable(f"Matryoshka's widths have to ascend from 1 to {d_sae} latents; they are {said}.")


_CHECKS: dict[tuple[str, ...], Callable[[Options, int], None]] = {
    WITH_K: _check_k,
    ("jumprelu",): _check_target,
    ("matryoshka_batchtopk",): _check_widths,
}
