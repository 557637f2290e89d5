// What a server serves, and where its training stands, as plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace shardmlp {

struct ClientPosition {
  int64_t step = 0;
  int64_t attempt = 0;
  int64_t weights_version = 0;
  friend bool operator==(const ClientPosition&, const ClientPosition&) = default;
};

struct ClientLayer {
  int layer = 0;
  std::string module;  // that x is given to: "model.layers.0.mlp"
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t output_size = 0;
  std::string activation;  // canonical name, as kernels/activation.h
  bool gated = false;
  double activation_limit = 0;  // of "clamped_swiglu" alone
};

struct ClientTensor {
  std::string name;  // as in the Hugging Face files
  int layer = 0;
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;
  uint64_t checksum = 0;  // XXH3-64; 0 unless asked for

  int64_t byte_count() const;
};

struct ClientTrainer {
  std::string run_id;
  int trainer_rank = 0;
  int trainer_count = 0;
  bool sealed = false;
};

struct ClientMemoryPlan {
  int64_t weights_bytes = 0;
  int64_t gradients_bytes = 0;
  int64_t master_weights_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t staging_bytes = 0;
  int64_t ledger_bytes = 0;
  int64_t stash_bytes = 0;
};

// A server's place among those of the same layers that are one to a run.
struct ClientReplica {
  int rank = 0;
  int replica_count = 1;
  int member_count = 1;  // that are there now
  int64_t generation = 0;
  std::vector<int> member_ranks = {};
};

struct ServedModel {
  std::string model_type;
  DType compute_dtype = DType::kF32;
  bool frozen = false;
  std::vector<ClientLayer> layers;
  std::vector<ClientTensor> tensors;
  int64_t max_message_bytes = 0;
  int64_t preferred_shard_bytes = 0;
  int64_t tile_row_count = 0;
  int64_t max_call_count = 0;
  ClientPosition position;
  std::vector<ClientTrainer> trainers;
  ClientMemoryPlan memory;
  ClientReplica replica;

  // Null where the server does not serve it.
  const ClientLayer* FindLayer(int layer) const;
  const ClientTensor* FindTensor(const std::string& name) const;
  // "rank 1 (not connected), rank 2": those of the run that have not sealed. Empty where all have.
  std::string MissingTrainers() const;
};

struct ClientCheckpoint {
  std::string name;
  int64_t step = 0;
  int64_t byte_count = 0;
};

// What a drained server left.
struct ClientDrain {
  ClientPosition position;
  std::optional<ClientCheckpoint> checkpoint;  // where it was told to save one
  bool cut_off = false;                        // calls or reads were still open when its time was over
  bool step_undecided = false;                 // so was a sealed step
};

}  // namespace shardmlp
