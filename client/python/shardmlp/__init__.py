"""Trains a PyTorch model whose MLPs live on a shardmlp-server.

    remote = shardmlp.offload(model, "localhost:50051")
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("tuned", state_dict=remote.state_dict())

Where the model does not fit here, ``model, remote = shardmlp.from_pretrained(folder, "localhost:50051")`` loads it
without its MLPs.

The server's tensors are trained with the optimizer that holds the model's parameters, each with its group's
hyperparameters. Their gradients, master weights and optimizer state never leave the server.
"""

from .connection import Timeouts
from .credentials import Credentials
from .errors import Error, StepAborted
from .gradient import ServerGradient
from .pretrained import from_pretrained
from .remote import OffloadedLayer, Remote, offload
from .remote_mlp import RemoteMLP

__all__ = [
    "Credentials",
    "Error",
    "OffloadedLayer",
    "Remote",
    "RemoteMLP",
    "ServerGradient",
    "StepAborted",
    "Timeouts",
    "from_pretrained",
    "offload",
]
