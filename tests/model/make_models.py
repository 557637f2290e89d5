"""Writes small random models of every family served, as transformers saves them, and what must be read from them.

OUT/<case>/model/                            save_pretrained's folder
OUT/<case>/expected.json                     the MLPs' configuration and the parameters' names and shapes
OUT/<case>/expected/<layer>.<part>.<dtype>   gate_up, gate_up_bias, down or down_bias, rounded to <dtype>, as raw f64
OUT/activations.json                         each activation of transformers: its name here, or null

What is expected comes from the modules that transformers makes of the folder, and is checked against their outputs.
"""

import json
import math
import pathlib
import shutil
import sys

import torch
import transformers
from rounding import rounded
from transformers.activations import ACT2FN

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2)
COMMON = dict(vocab_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GPT2 = dict(n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=32, bos_token_id=1, eos_token_id=2)

FORMULAS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_fast": lambda x: x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


def family(name, **config):
    head_dim = dict(head_dim=8) if name in ("Llama", "Mistral", "Qwen3", "Nemotron") or "Gemma" in name else {}
    return getattr(transformers, name + "Config")(**{**SIZES, **COMMON, **head_dim, **config})


def cases():
    """Name -> (config, model class, dtype, config.json's keys to overwrite, save_pretrained's arguments)."""
    lm, base, masked = transformers.AutoModelForCausalLM, transformers.AutoModel, transformers.AutoModelForMaskedLM
    shards = dict(max_shard_size="4KB")
    yield "llama", family("Llama"), lm, torch.float32, {}, {}
    yield "llama_biased", family("Llama", mlp_bias=True), lm, torch.float32, {}, {}
    yield "llama_sharded", family("Llama"), lm, torch.bfloat16, {}, shards
    yield "llama_base", family("Llama"), base, torch.float32, {}, {}
    yield "llama_f16", family("Llama", hidden_act="gelu_fast"), lm, torch.float16, {}, {}
    yield "llama_f64", family("Llama"), lm, torch.float64, {}, {}
    yield "mistral", family("Mistral"), lm, torch.float32, {}, {}
    yield "qwen2", family("Qwen2"), lm, torch.float32, {}, {}
    yield "qwen3", family("Qwen3"), lm, torch.float32, {}, {}
    yield "olmo2", family("Olmo2"), lm, torch.float32, {}, {}
    yield "cohere", family("Cohere"), lm, torch.float32, {}, {}
    yield "granite", family("Granite", mlp_bias=True), lm, torch.float32, {}, {}
    yield "gemma", family("Gemma"), lm, torch.float32, {}, {}
    yield "gemma_legacy", family("Gemma"), lm, torch.float32, {"hidden_act": "gelu"}, {}
    yield "gemma_other_key", family("Gemma", hidden_act="relu"), lm, torch.float32, {"hidden_activation": "silu"}, {}
    yield "gemma2", family("Gemma2"), lm, torch.float32, {}, {}
    yield "gemma2_silu", family("Gemma2", hidden_activation="silu"), lm, torch.bfloat16, {}, {}
    yield "gemma3", family("Gemma3Text"), lm, torch.float32, {}, {}
    yield "gemma3_base", family("Gemma3Text"), base, torch.float32, {}, shards
    yield "glm4", family("Glm4", head_dim=8), lm, torch.float32, {}, {}
    yield "phi3", family("Phi3"), lm, torch.float32, {}, {}
    yield "phi3_sharded", family("Phi3"), lm, torch.float32, {}, shards
    yield "gpt2", transformers.GPT2Config(**GPT2), lm, torch.float32, {}, {}
    yield "gpt2_base", transformers.GPT2Config(**GPT2), base, torch.float32, {}, shards
    yield "gpt2_inner", transformers.GPT2Config(**GPT2, n_inner=40), lm, torch.bfloat16, {}, {}
    yield "gpt2_relu", transformers.GPT2Config(**GPT2, activation_function="relu"), lm, torch.float64, {}, {}
    yield "nemotron", family("Nemotron"), lm, torch.float32, {}, {}
    yield "nemotron_biased", family("Nemotron", mlp_bias=True), lm, torch.bfloat16, {}, {}
    yield "gpt_neox", family("GPTNeoX"), lm, torch.float32, {}, {}
    yield "gpt_neox_base", family("GPTNeoX", hidden_act="gelu_new"), base, torch.bfloat16, {}, shards
    yield "falcon", family("Falcon"), lm, torch.float32, {}, {}
    yield "falcon_biased", family("Falcon", bias=True, ffn_hidden_size=24), lm, torch.float32, {}, shards
    yield "starcoder2", family("Starcoder2"), lm, torch.float32, {}, {}
    yield "starcoder2_unbiased", family("Starcoder2", use_bias=False), base, torch.float32, {}, {}
    yield "phi", family("Phi"), lm, torch.float32, {}, {}
    yield "opt", family("OPT", ffn_dim=24), lm, torch.float32, {}, {}
    yield "opt_unbiased", family("OPT", ffn_dim=24, enable_bias=False), lm, torch.bfloat16, {}, shards
    yield "opt_base", family("OPT", ffn_dim=24, activation_function="gelu"), base, torch.float32, {}, {}
    yield "bert", family("Bert"), masked, torch.float32, {}, {}
    yield "bert_base", family("Bert", hidden_act="gelu_new"), base, torch.bfloat16, {}, shards
    yield "modernbert", family("ModernBert"), masked, torch.float32, {}, {}
    yield "modernbert_biased", family("ModernBert", mlp_bias=True), base, torch.float32, {}, shards


def activation_name(activation):
    x = torch.linspace(-20, 20, 1001, dtype=torch.float64)
    try:
        y = activation(x)
    except RuntimeError:  # parameters of another dtype
        return None
    names = [name for name, formula in FORMULAS.items() if torch.allclose(y, formula(x), rtol=0, atol=1e-13)]
    assert len(names) <= 1, names
    return names[0] if names else None


# What an MLP's linears are called: those that make [G | U], and the one that makes Y.
LINEARS = [
    (["gate_up_proj"], "down_proj"),
    (["gate_proj", "up_proj"], "down_proj"),
    (["up_proj"], "down_proj"),
    (["c_fc"], "c_proj"),
    (["fc1"], "fc2"),
    (["dense_h_to_4h"], "dense_4h_to_h"),
    (["intermediate.dense"], "output.dense"),
    (["Wi"], "Wo"),
]
ACTIVATIONS = ["act_fn", "activation_fn", "act", "intermediate.intermediate_act_fn"]

# The modules within a layer that compute its MLP, one after another, where it has none of its own.
CHAINS = {"opt": ["fc1", "activation_fn", "fc2"], "bert": ["intermediate", "output.dense"]}


def mlp_parts(mlp):
    """The activation and the parameters of what holds an MLP, as a layer stores them: weights [out, in], gate rows
    first."""
    modules = dict(mlp.named_modules())
    ups, down = next((ups, down) for ups, down in LINEARS if modules.keys() >= {*ups, down})
    ups, down = [modules[name] for name in ups], modules[down]
    turned = type(down).__name__ == "Conv1D"  # [in, out]
    weights = [linear.weight.T if turned else linear.weight for linear in [*ups, down]]
    parts = {"gate_up": torch.cat(weights[:-1]), "down": weights[-1]}
    if down.bias is not None:
        parts["gate_up_bias"] = torch.cat([up.bias for up in ups])
        parts["down_bias"] = down.bias
    return next(modules[name] for name in ACTIVATIONS if name in modules), parts


def check_output(chain, formula, gated, parts):
    x = torch.randn(5, parts["gate_up"].shape[1], dtype=torch.float64)
    inner = x @ parts["gate_up"].T + parts.get("gate_up_bias", 0)
    gate, up = inner.chunk(2, dim=-1) if gated else (inner, 1)
    expected = (formula(gate) * up) @ parts["down"].T + parts.get("down_bias", 0)
    torch.testing.assert_close(torch.nn.Sequential(*chain)(x), expected, rtol=1e-12, atol=1e-12)


def write_expected(folder, model):
    first, *rest = CHAINS.get(model.config.model_type, ["mlp"])
    firsts = [name for name, _ in model.named_modules() if name.endswith("." + first)]
    tensors = {}
    (folder / "expected").mkdir()
    for layer, path in enumerate(firsts):
        owner = model.get_submodule(path.removesuffix("." + first))
        chain = [owner.get_submodule(part) for part in (first, *rest)]
        mlp_tensors = {id(p) for module in chain for p in module.parameters()}
        tensors |= {name: list(p.shape) for name, p in model.named_parameters() if id(p) in mlp_tensors}
        activation, parts = mlp_parts(owner if rest else chain[0])
        intermediate = parts["down"].shape[1]
        gated = parts["gate_up"].shape[0] == 2 * intermediate
        name = activation_name(activation)
        check_output(chain, FORMULAS[name], gated, parts)
        for part, values in parts.items():
            for dtype_name, dtype in DTYPES.items():
                exact = rounded(values.contiguous(), dtype).to(torch.float64)
                (folder / "expected" / f"{layer}.{part}.{dtype_name}").write_bytes(exact.numpy().tobytes())
    return {
        "model_type": model.config.model_type,
        "modules": firsts,
        "tensors": tensors,
        "activation": name,
        "gated": gated,
        "hidden_size": parts["gate_up"].shape[1],
        "intermediate_size": intermediate,
        "output_size": parts["down"].shape[0],
        "gate_up_bias": "gate_up_bias" in parts,
        "down_bias": "down_bias" in parts,
    }


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


@torch.no_grad()
def write_case(folder, config, auto_class, dtype, overwritten, arguments):
    model = auto_class.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.5)
    saved = folder / "model"
    model.save_pretrained(saved, **arguments)
    if arguments:
        assert (saved / "model.safetensors.index.json").exists()
    config_path = saved / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | overwritten, indent=2))
    loaded = auto_class.from_pretrained(saved, dtype=torch.float64).eval()
    (folder / "expected.json").write_text(json.dumps(write_expected(folder, loaded), indent=2))


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    for name, *case in cases():
        (out / name).mkdir()
        write_case(out / name, *case)
    activations = {name: activation_name(ACT2FN[name]) for name in ACT2FN}
    (out / "activations.json").write_text(json.dumps(activations, indent=2))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
