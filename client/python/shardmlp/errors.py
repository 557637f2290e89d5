"""What can go wrong between a trainer and its server."""

from __future__ import annotations


class Error(RuntimeError):
    """A refusal or failure, of the server or on the way to it.

    Attributes:
        code: What to do next, as a gRPC code: INVALID_ARGUMENT (fix the request), NOT_FOUND, FAILED_PRECONDITION
            (right in itself, wrong in the present state), RESOURCE_EXHAUSTED, UNAVAILABLE (the server is gone or
            unreachable; the client's retries are used up), ABORTED (redo the step), DATA_LOSS, INTERNAL.
        reason: One word for programs, such as "STALE_WEIGHTS"; the project's docs/protocol.md lists them.
        metadata: The facts of the case, by name.
    """

    def __init__(
        self,
        message: str,
        code: str = "UNKNOWN",
        reason: str = "UNSPECIFIED",
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})

    def __reduce__(self):
        return type(self), (str(self), self.code, self.reason, self.metadata)


class StepAborted(Error):
    """The step's attempt ended under this trainer: another trainer was lost, discarded it, or the server was restored.

    When it is raised, from forward, backward, clipping, unscaling or ``optimizer.step()``, local gradients have been
    zeroed, local parameters and optimizer state are as they were before the step, and the next attempt is open: run the
    step's batches again. A GradScaler that had unscaled the gradients needs its ``update()`` first.
    """
