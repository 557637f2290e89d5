"""A model with its MLPs on a server beside the same model without: what training tests compare."""

from __future__ import annotations

from models import load_model, relative, train


class Twins:
    """A model with its MLPs on a server, and the same model without."""

    def __init__(self, folder, serve, offload, family="llama", **options):
        self.server = serve(folder(family))
        self.model, self.local = load_model(folder(family)), load_model(folder(family))
        self.remote = offload(self.model, self.server, **options)

    def optimize(self, kind, groups=lambda model: model.parameters(), **hyperparameters):
        self.mine = self.remote.wrap(kind(groups(self.model), **hyperparameters))
        self.theirs = kind(groups(self.local), **hyperparameters)

    def each(self):
        return (self.model, self.mine), (self.local, self.theirs)

    def step(self, seed):
        """One usual step of both; returns both losses."""
        return [train(model, optimizer, [seed])[0] for model, optimizer in self.each()]

    def difference(self):
        """Of all weights, the largest, relative to the largest of its tensor."""
        mine, theirs = self.remote.state_dict(), self.local.state_dict()
        return max(relative(mine[name], theirs[name]) for name in theirs)
