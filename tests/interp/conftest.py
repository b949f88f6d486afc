"""The tiny models, tokenizers, SAE and activations that the field cases are told in.

All are random with seed 0. Ranges are large and biases non-zero on purpose: with the usual initialisation of 0.02 a
model is nearly the identity, and many wrong formulas pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from jobs.interp.models import LanguageModel
from jobs.interp.sae.architectures import SAE, TopK
from jobs.interp.sae.metrics import Measure, Quality

VOCABULARY, WIDTH, LIMIT = 64, 16, 32
LETTERS = "abcdefghijklmnopqrstuvwxyz .,-"  # 30 characters, ids 4 to 33


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors this small are faster in one thread, by far when other tests run beside."""
    torch.set_num_threads(1)


def random_model(cls: type, config: Any) -> Any:
    """A model with random weights, biases and norms of its own, in eval mode."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.eval().requires_grad_(False)


def gpt2() -> Any:
    return random_model(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=LIMIT, initializer_range=0.5
        ),
    )


def llama() -> Any:
    return random_model(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LIMIT,
            initializer_range=0.5,
        ),
    )


def gemma2() -> Any:
    return random_model(
        Gemma2ForCausalLM,
        Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=LIMIT,
            initializer_range=5.0,
            final_logit_softcapping=30.0,
            attn_implementation="eager",
        ),
    )


def neox(*, parallel: bool = True) -> Any:
    return random_model(
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LIMIT,
            initializer_range=0.5,
            use_parallel_residual=parallel,
        ),
    )


MODELS = {"G2": gpt2, "LL": llama, "GE": gemma2, "NX": neox}


def tokenizer(**options: str) -> PreTrainedTokenizerFast:
    """TK: one token per character; pad 0, bos 1, eos 2, unk 3."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **(special | options))


def assert_same_vectors(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to a part in 100 000 of each vector's length. Shapes: `[n, d]`."""
    assert found.shape == expected.shape
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5


def language_model(name: str, **options: str) -> LanguageModel:
    return LanguageModel(MODELS[name](), tokenizer(**options), name, "cpu")


@pytest.fixture
def G2() -> LanguageModel:
    return language_model("G2")


@pytest.fixture
def LL() -> LanguageModel:
    return language_model("LL")


@pytest.fixture(params=sorted(MODELS))
def any_model(request: pytest.FixtureRequest) -> LanguageModel:
    """Each of the four families in turn."""
    return language_model(request.param)


@pytest.fixture
def S8() -> TopK:
    """Input 8, latents 24, k 4; all weights and biases random and non-zero."""
    return s8()


def s8(dtype: torch.dtype = torch.float32) -> TopK:
    torch.manual_seed(0)
    sae = TopK(8, 24, 4, dtype=dtype)
    with torch.no_grad():
        for weight in sae.parameters():
            weight.copy_(torch.randn_like(weight))
    return sae


@pytest.fixture
def X32() -> torch.Tensor:
    """32 x 8 standard normal."""
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def X7(X32: torch.Tensor) -> torch.Tensor:
    return 7 * X32


def quality(sae: SAE, batches: Iterable[Tensor]) -> Quality:
    """`sae` measured on raw vectors. Shapes: as `Measure.add`'s."""
    measure = Measure(sae)
    for batch in batches:
        measure.add(batch)
    return measure.quality()
