"""Claim: no job takes more memory than its estimate says, and the estimate is at most 1.3 times the peak in nine of
ten shapes above 1 GiB: at least five of every kind.

    MISTUDIO_HOME=... .venv/bin/python -m bench.estimates [words of cases]

Runs the kinds as the fork server's children run, without the engine, and looks at their private memory
(`Private_Clean + Private_Dirty`, what a simulated card counts) every 40 ms. The keeper of a real job looks less
often and may miss a short peak. Needs the demo's wheel or the network once; keeps it, and models of larger shapes with
random weights, in the data folder. The formulas are held against the peaks, not what earlier jobs made of them.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")
os.environ.setdefault("MISTUDIO_GPU_BACKEND", "simulated")  # estimates of mathematics on the CPU
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # as the fork server sets them
django.setup()

from django.conf import settings  # noqa: E402

from gpus import procfs  # noqa: E402
from jobs import estimates, registry  # noqa: E402
from jobs.exceptions import HandedOver  # noqa: E402
from jobs.kind import JobKind  # noqa: E402
from tests.kinds import fake  # noqa: E402

Case = tuple[str, str, dict[str, Any]]
MODEL = "smollm2-135m-instruct"


def peak_of(work: Callable[[], Any]) -> tuple[int, float]:
    """Largest private memory of a forked child that does `work`, in bytes, and its seconds."""
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    peak = 0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        peak = max(peak, procfs.private_bytes(pid) or 0)
        time.sleep(0.04)
    return peak, time.monotonic() - began


#: Llama models with random weights and the demo's words: width, blocks, stored type. 255 and 460 million parameters.
SHAPES = {"wide": (1024, 16, "bfloat16"), "deep": (1024, 32, "bfloat16"), "full": (1024, 16, "float32")}


def cases(shelf: fake.Shelf) -> Iterator[Case]:
    """Name, kind, parameters; what earlier ones make is on the shelf for later ones."""
    yield "download, in the cache", "model_download", {"source": "demo"}
    yield "download, to float32", "model_download", {"source": "demo", "dtype": "float32"}
    for name, dtype in (
        ("wide", "float32"), ("deep", "float32"), ("full", "bfloat16"), ("full", "float16"), ("deep", "float16"),
    ):  # fmt: skip
        yield (
            f"download, {name} to {dtype}",
            "model_download",
            {"source": str(folder_of(name)), "dtype": dtype},
        )
    for name in ("demo", "wide", "deep", "full"):
        for scheme in ("int8", "nf4"):
            source = name if name == "demo" else str(folder_of(name))
            yield (
                f"quantization, {name} to {scheme}",
                "model_download",
                {"source": source, "quantization": scheme},
            )
    extraction = {"model": MODEL, "sites": [{"block": 8}], "context_size": 128}
    for batch, tokens in ((8, 6_000), (16, 6_000), (64, 16_000), (128, 20_000)):
        name = f"extraction, {batch} x 128"
        yield name, "activation_extraction", extraction | {"batch_size": batch, "max_tokens": tokens}
    long = {"batch_size": 8, "context_size": 512, "max_tokens": 8_000}
    yield "extraction, 8 x 512", "activation_extraction", extraction | long
    sites = [{"block": block} for block in range(8)]
    more = extraction | {"batch_size": 16, "max_tokens": 20_000, "sites": sites, "dtype": "float32"}
    yield "extraction, 8 sites", "activation_extraction", more
    names = ("resid_pre", "resid_mid", "resid_post", "mlp_in", "mlp_out", "attn_out")
    every = [{"block": block, "site": name} for block in range(8) for name in names]
    many = {"batch_size": 64, "max_tokens": 20_000, "sites": every}
    yield "extraction, 48 sites", "activation_extraction", extraction | many
    packed = {"batch_size": 64, "context_size": 256, "max_tokens": 40_000, "packing": True}
    yield "extraction, packed, 64 x 256", "activation_extraction", extraction | packed
    for name, block in (("wide", 3), ("deep", 2)):
        small = {"model": name, "sites": [{"block": block}], "batch_size": 16, "max_tokens": 4_000}
        yield f"extraction, {name} model", "activation_extraction", extraction | small
    training = {"activations": f"{MODEL}-english-b8", "k": 32, "checkpoint_every": 3}
    for d_sae, batch in ((2304, 2048), (4608, 4096), (9216, 4096), (9216, 8192), (18432, 4096)):
        wide = training | {"d_sae": d_sae, "batch_size": batch, "tokens": 6 * batch}
        yield f"training, {d_sae} latents, {batch}", "sae_training", wide
        yield f"training, {d_sae} latents, {batch}, no CE", "sae_training", wide | {"ce_tokens": 0}


def folder_of(name: str) -> Path:
    return settings.MISTUDIO_HOME / "import" / name


def make_model(name: str) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from jobs.kinds.model_download import demo_folder

    width, blocks, dtype = SHAPES[name]
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=width, intermediate_size=2816, num_hidden_layers=blocks,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder_of(name))
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(folder_of(name))


def is_wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def run_case(shelf: fake.Shelf, case: Case) -> None:
    name, kind_name, params = case
    kind = registry.get(kind_name)
    serializer = kind.Params(data=params)
    serializer.is_valid(raise_exception=True)
    given = serializer.validated_data
    references = [field for field in ("model", "activations") if given.get(field)]
    inputs = {field: shelf.named(given[field]) for field in references}
    stage = next(iter(kind.card_stages(given)), "")
    estimate = estimates.formula(kind, given, inputs, stage)
    job = fake.FakeContext(shelf, name.replace(" ", "-").replace(",", ""), inputs)
    job.device = "cpu"
    if stage:
        peak_of(lambda: handed_over(kind, job, given))
        job.stage = stage
    peak, seconds = peak_of(lambda: kind.run(job, given))
    parts = " ".join(f"{part} {size / 1e6:.0f}" for part, size in estimate.breakdown.items())
    print(
        f"{name:38} estimate {(estimate.memory_bytes or 0) / 1e6:6.0f} MB, peak {peak / 1e6:6.0f} MB, "
        f"ratio {(estimate.memory_bytes or 0) / peak:.2f}, {seconds:.0f} s  ({parts})",
        flush=True,
    )


def handed_over(kind: JobKind, job: fake.FakeContext, params: dict[str, Any]) -> None:
    """The stage before the one on the card."""
    with suppress(HandedOver):
        kind.run(job, params)


def stock(shelf: fake.Shelf, wanted: list[str]) -> None:
    """The models and activations that the wanted cases take."""
    for kind_name, params in (
        ("model_download", {"source": "demo"}),
        (
            "activation_extraction",
            {"model": MODEL, "sites": [{"block": 8}], "context_size": 128, "max_tokens": 16_000},
        ),
    ):
        fake.run(registry.get(kind_name), shelf, job=kind_name, **params)
    for name in SHAPES if not wanted else [name for name in SHAPES if any(name in word for word in wanted)]:
        if not (folder_of(name) / "config.json").exists():
            make_model(name)
        source = {"source": str(folder_of(name))}
        fake.run(registry.get("model_download"), shelf, job=name, **source)


def main() -> None:
    import pickle

    from jobs import forkserver

    forkserver.preload()
    gc.collect()
    gc.freeze()
    wanted = sys.argv[1:]
    settings.MISTUDIO_HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.MISTUDIO_HOME) as folder:
        shelf, notes = fake.Shelf(Path(folder)), Path(folder) / "shelf.pickle"

        def made() -> None:
            stock(shelf, wanted)
            notes.write_bytes(pickle.dumps(shelf.items))

        peak, seconds = peak_of(made)
        print(f"stock made in {seconds:.0f} s, peak {peak / 1e6:.0f} MB", flush=True)
        shelf.items = pickle.loads(notes.read_bytes())
        for case in cases(shelf):
            if is_wanted(case[0], wanted):
                run_case(shelf, case)


if __name__ == "__main__":
    main()
