"""Memory that does not grow with the corpus, names that another library gives, and a real card."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.interp.activations import Recipe, extract
from jobs.interp.hooks import capture
from jobs.interp.site import HOOKS, Site
from jobs.interp.tokens import Row
from tests.interp.conftest import LETTERS, MODELS, language_model

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / ".venv-oracle" / "bin" / "python"

# Peak of the process above what it held before, in MiB, of an extraction from a file.
MEASURE = """
import re, sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from jobs.interp import corpora
from jobs.interp.activations import Recipe, extract
from jobs.interp.site import Site
from jobs.interp.tokens import RowStream
from tests.interp.conftest import language_model

def peak():
    # Not ru_maxrss, which a child takes over from whom it was forked from.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

lm = language_model("LL")
def go(path, most):
    documents = corpora.open_corpus(path).documents
    rows = RowStream(documents, lm.tokenizer, 32, max_tokens=most, bos_id=1)
    with tempfile.TemporaryDirectory() as folder:
        extract(lm, rows, Recipe((Site(0),), "bfloat16"), Path(folder) / "a", batch_size=256)

go(sys.argv[1], 40_000)  # what any extraction takes
before = peak()
go(sys.argv[2], int(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, form: str) -> None:
    """64 MB of text, of which 600 000 tokens are read: less than 24 MiB beyond what 40 000 tokens of a MB take."""
    paragraph = (LETTERS * 40)[:1000]
    files = {f"small.{form}": 1000, f"large.{form}": 64_000}
    for name, paragraphs in files.items():
        with open(tmp_path / name, "w") as file:
            for _ in range(paragraphs):
                file.write(paragraph + "\n\n" if form == "txt" else json.dumps({"text": paragraph}) + "\n")
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in files), "600000"]
    grown = float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    print(f"{form}: {grown:.1f} MiB more")
    assert grown < 24


def folder_of_work(folder: Path, rows: list[Row]) -> None:
    torch.set_num_threads(1)
    extract(
        language_model("LL"), iter(rows), Recipe((Site(1), Site(0, "attn_out")), shard_tokens=200), folder
    )


@pytest.mark.slow
def test_kills_change_no_byte(tmp_path: Path) -> None:
    """SIGKILL at random moments, in the middle of shards and files: in the end there is what a straight run gives."""
    draw, rows = (
        random.Random(0),
        [Row(n, (1, *(4 + (n * 7 + i) % 30 for i in range(15)))) for n in range(2500)],
    )
    fork = multiprocessing.get_context("fork")
    folder_of_work(tmp_path / "straight", rows)
    kills, done = 0, False
    while not done:
        child = fork.Process(target=folder_of_work, args=(tmp_path / "killed", rows))
        child.start()
        child.join(draw.uniform(0.05, 0.6) if kills < 20 else None)
        done = not child.is_alive()
        if not done:
            child.kill()
            child.join()
            kills += 1
    print(f"{kills} kills")
    assert kills >= 5
    straight, killed = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.suffix == ".safetensors"
         and not path.name.startswith(".tmp-")}
        for folder in (tmp_path / "straight", tmp_path / "killed")
    )  # fmt: skip
    assert straight == killed


# What TransformerLens' bridge calls the places of block 1, from the same weights: a file for each model of a folder.
BRIDGE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformer_lens.model_bridge import TransformerBridge

for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    options = {"tokenizer": AutoTokenizer.from_pretrained(folder), "device": "cpu", "dtype": torch.float32}
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model, **options)
    _, cache = bridge.run_with_cache(torch.tensor([json.loads(sys.argv[2])]), prepend_bos=False)
    names = [name for name in cache if name.startswith("blocks.1.") and cache[name].ndim == 3]
    save_file({name: cache[name][0].clone().contiguous() for name in names}, f"{folder}.safetensors")
"""


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not ORACLE.exists(), reason="transformer_lens is not installed (make oracle)")
def test_every_site_is_what_transformer_lens_calls_by_its_name(tmp_path: Path) -> None:
    """Four families. Only `mlp_in` has another name there (`mlp.hook_in`): `ln2.hook_normalized` is before the norm's
    weight unless that was folded into the MLP."""
    from safetensors.torch import load_file

    ids = [1, 5, 9, 12, 7, 30, 8]
    for name in MODELS:
        lm = language_model(name)
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    command = [str(ORACLE), "-c", BRIDGE, str(tmp_path), json.dumps(ids)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    differing = []
    for name in MODELS:
        lm, theirs = language_model(name), load_file(tmp_path / f"{name}.safetensors")
        for site in HOOKS:
            if (name, site) == ("NX", "resid_mid"):
                continue
            place = Site(1, site)
            ours = capture(lm.model, [place], input_ids=torch.tensor([ids]))[place][0]
            called = "blocks.1.mlp.hook_in" if site == "mlp_in" else place.hook_name
            if called not in theirs or not torch.allclose(ours, theirs[called], atol=1e-4, rtol=1e-4):
                differing.append(
                    f"{name} {called}: {sorted(theirs) if called not in theirs else 'other values'}"
                )
    assert differing == []
