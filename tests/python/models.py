"""Small random models of each served family, as a user would have them: a folder on disk, loaded by transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers import (
    BertConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    NemotronConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

VOCABULARY = 61

_COMMON = dict(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0)
_SIZES = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, **_SIZES, tie_word_embeddings=True),
    "llama_biased": LlamaConfig(**_COMMON, **_SIZES, mlp_bias=True, hidden_act="gelu"),
    "mistral": MistralConfig(**_COMMON, **_SIZES),
    "qwen2": Qwen2Config(**_COMMON, **_SIZES),
    "qwen3": Qwen3Config(**_COMMON, **_SIZES, head_dim=12),
    "olmo2": Olmo2Config(**_COMMON, **_SIZES),
    "cohere": CohereConfig(**_COMMON, **_SIZES),
    "granite": GraniteConfig(**_COMMON, **_SIZES, mlp_bias=True, residual_multiplier=0.22),
    "gemma": GemmaConfig(**_COMMON, **_SIZES, head_dim=12),
    "gemma2": Gemma2Config(**_COMMON, **_SIZES, head_dim=12),
    "gemma3": Gemma3TextConfig(**_COMMON, **_SIZES, head_dim=12),
    "phi3": Phi3Config(**_COMMON, **_SIZES, resid_pdrop=0.0),
    "glm4": Glm4Config(**_COMMON, **_SIZES, head_dim=12),
    "gpt2": GPT2Config(**_COMMON, n_embd=48, n_layer=3, n_head=4, n_positions=64, n_inner=80),
    "nemotron": NemotronConfig(**_COMMON, **_SIZES, mlp_bias=True),
    "gpt_neox": GPTNeoXConfig(**_COMMON, **_SIZES),
    "falcon": FalconConfig(**_COMMON, **_SIZES, ffn_hidden_size=80, bias=True),
    "starcoder2": Starcoder2Config(**_COMMON, **_SIZES, residual_dropout=0.1),
    "phi": PhiConfig(**_COMMON, **_SIZES),
    "opt": OPTConfig(**_COMMON, **_SIZES, ffn_dim=80, word_embed_proj_dim=48),
    "bert": BertConfig(**_COMMON, **_SIZES),
    "modernbert": ModernBertConfig(**_COMMON, **_SIZES, mlp_bias=True),
}

# The modules within a layer that compute its MLP, one after another, where it has none of its own.
_CHAINS = {"opt": ["fc1", "activation_fn", "fc2"], "bert": ["intermediate", "output.dense"]}


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a random model of ``family``, its biases and norms random too, to ``folder``."""
    torch.manual_seed(len(family))
    config = FAMILIES[family]
    masked = config.model_type in ("bert", "modernbert")
    model = (transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.to(dtype).save_pretrained(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Without dropout, so that two of them are twins."""
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()


def mlps(model: PreTrainedModel) -> dict[str, torch.nn.Sequential]:
    """Each layer's MLP, by the path of the module that its input is given to."""
    first, *rest = _CHAINS.get(model.config.model_type, ["mlp"])
    found = {}
    for path, _ in model.named_modules():
        if path.endswith("." + first):
            owner = path.removesuffix(first)
            found[path] = torch.nn.Sequential(*(model.get_submodule(owner + name) for name in (first, *rest)))
    return found


def mlp_names(model: PreTrainedModel) -> set[str]:
    """The names of all MLPs' parameters."""
    theirs = {id(p) for mlp in mlps(model).values() for p in mlp.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in theirs}


def tokens(seed: int, batch: int = 2, length: int = 7) -> torch.Tensor:
    """[batch, length] int64."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, seed: int, **sizes: int) -> torch.Tensor:
    """The language-modelling loss of a random batch; of a masked model, as if all were masked."""
    ids = tokens(seed, **sizes)
    return model(input_ids=ids, labels=ids).loss


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: Iterable[int], max_norm: float | None = None
) -> list[float]:
    """A usual step on each of some random batches; returns their losses."""
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest expected value."""
    assert got.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().item()
    difference = (got.double() - expected.double()).abs().max().item()
    return difference / scale if scale else difference
