// What a server is told to do, and the command line that says it.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/device.h"
#include "server/engine/engine_options.h"
#include "server/log.h"
#include "server/model/model_folder.h"
#include "server/rpc/rpc_server.h"
#include "server/sync/rendezvous/replicas_options.h"

namespace shardmlp {

// How replicas sum their gradients.
enum class SumBy {
  kAuto,  // NCCL between GPUs where there is NCCL, else Gloo
  kGloo,  // from host memory to host memory over TCP
  kNccl,  // from GPU memory to GPU memory
};

struct ServerOptions {
  std::string model_path;    // a Hugging Face folder
  ModelFolderOptions model;  // which layers, in which dtype
  DeviceOptions device;
  EngineOptions engine;
  RpcServerOptions rpc;
  ReplicasOptions replicas;
  SumBy sum_by = SumBy::kAuto;
  std::string metrics_address = "127.0.0.1:9464";    // empty: no metrics
  std::string checkpoint_dir;                        // empty: no checkpoints
  std::string drain_checkpoint;                      // saved at the end of a drain; empty: none
  std::string restore;                               // at start; empty: nothing; "latest": the latest, if there is one
  absl::Duration drain_timeout = absl::Seconds(25);  // from SIGTERM to cancelling what is still open
  LogOptions log;
  bool check_config = false;  // do no more than check these
};

// Reads `--name=value`, `--name value` and, for switches, `--name`; the last of a flag's repeats counts.
// INVALID_ARGUMENT, naming the flag, for one that is unknown or has a bad value, and for options that contradict each
// other (Validate), which are left to who checks, and looks at files too, where check_config is asked for.
// "--help" is the caller's to look for.
absl::StatusOr<ServerOptions> ParseOptions(absl::Span<const char* const> arguments);

// INVALID_ARGUMENT, naming all flags that contradict each other, with their values.
absl::Status Validate(const ServerOptions& options);

// What --help prints.
std::string Usage();

}  // namespace shardmlp
