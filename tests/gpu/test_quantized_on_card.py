"""On a real card: weights are packed within the estimate, the original visits it a block at a time and loses what it
loses on the CPU. In a process of its own, so that the card is free again for the others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.system import ROOT

pytestmark = pytest.mark.gpu
PACKED = """
import json, sys, tempfile, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from jobs.interp import headers, models, probe, quantize, sizes
from tests.interp.conftest import tokenizer

folder, target = Path(tempfile.mkdtemp()) / "m", Path(tempfile.mkdtemp()) / "q"
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=8192, hidden_size=2048, intermediate_size=5632, num_hidden_layers=12,
    num_attention_heads=16, num_key_value_heads=4)).to(torch.bfloat16).save_pretrained(folder)
tokenizer().save_pretrained(folder)
weights = headers.Weights.of(folder)
need = sizes.quantizing(weights, sys.argv[1], on_cpu=False)
found = quantize.compared(folder, target, sys.argv[1], device="cuda:0")
taken = torch.cuda.max_memory_reserved()
on_cpu = probe.loss(models.load(folder), "cpu")
print(json.dumps(found | {"taken": taken, "need": sum(need.values()) - need["cuda"], "on_cpu": on_cpu,
    "original": weights.bytes}))
"""


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_weights_are_packed_on_the_card_within_the_estimate(scheme: str) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
    command = [sys.executable, "-c", PACKED, scheme]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    print(scheme, found)
    assert (found["modules_quantized"], found["quantized_on"]) == (84, "cuda:0")
    assert found["taken"] <= found["need"] + 64 * 2**20  # what the allocator holds in reserve
    assert found["need"] < found["original"]
    assert found["loss_before"] == pytest.approx(found["on_cpu"], abs=0.05)
