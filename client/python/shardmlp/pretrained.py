"""shardmlp.from_pretrained: a model whose MLPs never are on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import _native
from .matching import check_weights
from .remote import Remote, offload
from .remote_mlp import set_fetches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_pretrained(
    folder: str | Path,
    target: str | Sequence[str],
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: str | torch.dtype = "auto",
    **options: Any,
) -> tuple[PreTrainedModel, Remote]:
    """The model of ``folder``, as transformers loads it, with its MLPs on the server, as :func:`offload` leaves it. The
    MLPs' weights never take memory here, so a model that does not fit can be trained. Needs transformers 5.

    The model is in evaluation mode, as transformers' is: call ``train()`` before training with dropout.

    Args:
        folder: A Hugging Face folder of the weights that the server was started with, config.json and safetensors in
            one file or several; or a name on the Hub, whose folder is then downloaded or taken from the cache.
        target: "host:port" or "unix:/path", or several, as for :func:`offload`.
        model_class: One of transformers' model classes. By default the one that config.json names.
        dtype: Of the parameters: "auto", as they are in the folder, or a torch.dtype.
        options: As for :func:`offload`. With ``resume=True`` the server's weights are taken as they are, and those in
            the folder need not be the same.

    Raises:
        ValueError: The server's weights are not the folder's (the first tensor that differs is named), or the model is
            not the server's.
        Error: The server is unreachable or refuses the session.
        OSError: The folder lacks a file, or can't be downloaded.
    """
    import huggingface_hub
    import transformers

    if not Path(folder).is_dir():
        folder = huggingface_hub.snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"])
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: expected a Hugging Face folder")
    if model_class is None:
        architectures = transformers.AutoConfig.from_pretrained(folder).architectures or ["none"]
        model_class = getattr(transformers, architectures[0], None)
        if model_class is None:
            raise ValueError(f"transformers has no class {architectures[0]}, which {folder}/config.json names")
    remotes: list[Remote] = []

    def build(self, *arguments: Any, **keywords: Any) -> None:
        """The model on the meta device, as transformers wants it ahead of loading; it loads what state_dict() names,
        and so no MLP."""
        model_class.__init__(self, *arguments, **keywords)
        with torch.device("cpu"):
            remote = offload(self, target, **options)
            remotes.append(remote)
            for connection in remote._servers.connections if not options.get("resume") else ():
                check_weights(_stored_weights(folder, connection.model.tensors), connection)
        set_fetches(self, False)
        self._keys_to_ignore_on_load_unexpected |= {f"^{re.escape(name)}$" for name in remote._names()}

    # The same class but for its constructor: transformers finds things by a class's name and module.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    without_mlps = type(model_class.__name__, (model_class,), {"__init__": build, **names})
    try:
        model = without_mlps.from_pretrained(folder, dtype=dtype)
    except BaseException:
        for remote in remotes:
            remote.close()
        raise
    model.__class__ = model_class
    set_fetches(model, True)
    return model, remotes[0]


def _stored_weights(
    folder: Path, tensors: Iterable[_native.Tensor]
) -> Iterator[tuple[str, torch.Tensor, _native.Tensor]]:
    """The server's ``tensors`` as they are in ``folder``'s files, which is read one tensor at a time."""
    from safetensors import safe_open

    files = _files(folder)
    for tensor in tensors:
        # A base model's files lack the first part of the names.
        stored = next((n for n in (tensor.name, tensor.name.partition(".")[2]) if n in files), None)
        stored = stored or next((n for n in files if n.partition(".")[2] == tensor.name), None)
        if stored is None:
            raise ValueError(f"cannot offload {tensor.name}: the server owns it and {folder} has no such tensor")
        with safe_open(files[stored], framework="pt") as file:
            yield stored, file.get_tensor(stored), tensor


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor in ``folder``."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: folder / "model.safetensors" for name in file.keys()}
