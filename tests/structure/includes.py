"""Which way includes may run: main -> rpc -> engine -> {sync, model} -> kernels; metrics and log are leaves."""

import re

from tree import source_files

PROTOCOL = ("proto/", "shardmlp/", "google/protobuf/", "google/rpc/", "grpc/", "grpcpp/")
# What the client shares with the server.
SHARED = ("kernels/matrix.h", "kernels/status.h", "kernels/optimizer.h")
# Constants that both ends of a connection know.
TIMES = ("proto/client_times.h", "proto/http2.h")
# How a server plans its memory, and reads what a model is: shardmlpctl plans with the same functions.
PLANNING = (
    "server/engine/engine_options.h",
    "server/engine/memory_plan.h",
    "server/model/file.h",
    "server/model/model_config.h",
    "server/model/model_spec.h",
)
# What shardmlpctl's commands share: the files of client/cli that stand below the commands' own folders.
COMMANDS_SHARE = (
    "client/cli/elements",
    "client/cli/flags",
    "client/cli/layer_cost",
    "client/cli/layers",
    "client/cli/stop",
    "client/cli/trainers_json",
    "client/cli/units",
)
COMMAND = ("client/cpp/", "kernels/", *COMMANDS_SHARE)
# Leaves.
METRICS = ("server/metrics", "server/process_metrics")
LOG = ("server/log",)

# Beginnings of paths: what a room may include besides itself. The first entry that fits a file is its room.
ALLOWED = {
    "kernels/": (),
    "proto/": (*PROTOCOL, "kernels/"),
    "server/metrics": METRICS,
    "server/process_metrics": METRICS,
    "server/log": LOG,
    "server/sync/rendezvous/": (*PROTOCOL, "server/sync/", "kernels/"),
    "server/sync/": ("kernels/",),
    "server/model/": ("kernels/",),
    "server/engine/": ("server/sync/", "server/model/", "kernels/", *METRICS, *LOG),
    "server/rpc/": (*PROTOCOL, "server/engine/", "server/sync/", "server/model/", "kernels/", *METRICS, *LOG),
    # main, server and options: gRPC's server, and every room but the protocol itself, of which they know the times.
    "server/": ("grpc/", "grpcpp/", "kernels/", *TIMES),
    "client/cpp/": (*PROTOCOL, *SHARED),
    "client/python/": ("client/cpp/", *SHARED),
    **dict.fromkeys(COMMANDS_SHARE, COMMAND),
    "client/cli/bench/": COMMAND,
    "client/cli/plan/": ("client/cli/bench/", *COMMAND, *PLANNING),
    "client/cli/top/": COMMAND,
    "client/cli/verify/": COMMAND,
    "client/cli/": ("client/cpp/", "kernels/"),
}
OURS = (*PROTOCOL, "kernels/", "server/", "client/", "tests/")
INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')


def wrong_includes(root):
    """Includes that run against the direction. Tests may include anything."""
    found = []
    for path in source_files(root, ".h", ".cc", ".cu"):
        name = path.relative_to(root).as_posix()
        room = next((room for room in ALLOWED if name.startswith(room)), None)
        if room is None:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = INCLUDE.match(line)
            if not include or not include[1].startswith(OURS) and not include[1].endswith(".pb.h"):
                continue
            if not include[1].startswith((room, *ALLOWED[room])):
                found.append(f"{name}:{number}: {room} must not include {include[1]}")
    return found
