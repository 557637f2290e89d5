"""Reads the checkpoints that family_test left: equal tensors, in the safetensors package and in transformers."""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from rounding import rounded
from safetensors.torch import load_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def load(folder):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float64)


def check(case, dtype_name):
    expected = json.loads((case / "expected.json").read_text())
    original = load(case / "model").state_dict()
    saved_path = case / f"checkpoints.{dtype_name}" / "saved" / "weights.safetensors"
    saved = load_file(saved_path)
    assert saved.keys() == expected["tensors"].keys(), (case, saved.keys())
    for name, tensor in saved.items():
        assert tensor.dtype == DTYPES[dtype_name], (case, name, tensor.dtype)
        assert torch.equal(tensor, rounded(original[name], DTYPES[dtype_name])), (case, name)

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(case / "model" / "config.json", folder)
        shutil.copy(saved_path, pathlib.Path(folder) / "model.safetensors")
        loaded = load(pathlib.Path(folder)).state_dict()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor.to(torch.float64)), (case, name)


def main(models):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = sorted(path for path in models.iterdir() if path.is_dir())
    assert cases, models
    for case in cases:
        for dtype_name in DTYPES:
            check(case, dtype_name)
    print(f"{len(cases)} models are read back as they were saved")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
