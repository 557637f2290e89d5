// Checkpoints: weights under their Hugging Face names, optimizer state, and a manifest with checksums.
//
//   <folder>/<name>/weights.safetensors     Hugging Face names, shapes and orientation
//                   optimizer.safetensors   "<name>.master", ".moment1", ".moment2", in the tensor's own shape
//                   manifest.json           format version, step, model, update histories, size and XXH3-64 of each
//                   file
//
// Written into a hidden folder beside the target, synced, and renamed over it, so that a name is always either the old
// checkpoint or the new one, whole. Opening verifies every checksum before anything is used.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/matrix.h"
#include "server/model/checksum.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// A tensor to be written. `read` fills `out`, of exactly the tensor's size, row-major; it is called once, and tensors
// are read one after another, so that one at a time need be in host memory.
struct CheckpointTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::function<absl::Status(absl::Span<char> out)> read;
};

struct CheckpointState {
  int64_t step = 0;
  int64_t generation = 0;                 // of the replicas whose state it is; 0: not known
  std::vector<UpdateHistory> updates;     // ModelSpec::tensors' order
  std::vector<CheckpointTensor> weights;  // ModelSpec::tensors' order
  std::vector<CheckpointTensor> optimizer;
};

struct CheckpointInfo {
  std::string name;
  int64_t step = 0;
  int64_t byte_count = 0;
};

// A checkpoint whose checksums were verified when it was opened.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  virtual int64_t step() const = 0;
  virtual int64_t generation() const = 0;
  virtual const std::vector<UpdateHistory>& updates() const = 0;
  virtual bool Has(const std::string& tensor_name) const = 0;
  // FAILED_PRECONDITION (CHECKPOINT_MISMATCH) unless Read would find that tensor in that type and size.
  virtual absl::Status Check(const std::string& tensor_name, DType dtype, int64_t byte_count) const = 0;
  // Reads a tensor of either file, as it was written. `out` must be of its size.
  virtual absl::Status Read(const std::string& tensor_name, DType dtype, absl::Span<char> out) const = 0;
};

// Ahead of a save that must not fail: INVALID_ARGUMENT for a name that Save refuses; else what keeps a file from being
// made in `path`, or, where that is missing, in the folder that it would be made in. Leaves nothing behind.
absl::Status CheckCanSave(const std::string& path, const std::string& name);

// A folder of checkpoints of one model. Thread-compatible: one call at a time.
class CheckpointStore {
 public:
  // `path` is made where it is missing; remains of interrupted saves in it are removed.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& path, const ModelSpec& model);

  // INVALID_ARGUMENT for a name that is not 1 to 128 letters, digits, '.', '_', '-', or starts with '.', or that
  // something other than a checkpoint has; RESOURCE_EXHAUSTED (STORAGE_FULL), before anything is written, where the
  // disk has no room for it beside the one that it replaces, and later for what a quota refuses; UNAVAILABLE while
  // another process saves here.
  absl::StatusOr<CheckpointInfo> Save(const std::string& name, const CheckpointState& state);
  // NOT_FOUND (UNKNOWN_CHECKPOINT); DATA_LOSS (CHECKPOINT_CORRUPT) naming the file; FAILED_PRECONDITION
  // (CHECKPOINT_MISMATCH) naming what differs from the model.
  absl::StatusOr<std::unique_ptr<Checkpoint>> Load(const std::string& name) const;
  // Takes a checkpoint, damaged or not, out of the folder and off the disk; nothing that it links to. INVALID_ARGUMENT
  // as for Save; NOT_FOUND (UNKNOWN_CHECKPOINT); UNAVAILABLE while another process saves here or has it loaded.
  absl::StatusOr<CheckpointInfo> Delete(const std::string& name);
  // Differs between any two checkpoints that were saved, whatever their name.
  absl::StatusOr<FileSum> Edition(const std::string& name) const;
  // Complete ones, oldest first.
  absl::StatusOr<std::vector<CheckpointInfo>> List() const;
  // The name of the newest, empty where there is none. DATA_LOSS (CHECKPOINT_CORRUPT), naming it, where one that lacks
  // a part may be newer than every whole one: how far to go back is a person's to say.
  absl::StatusOr<std::string> Latest() const;

 private:
  CheckpointStore(std::string path, ModelSpec model) : path_(std::move(path)), model_(std::move(model)) {}
  std::string path_;
  ModelSpec model_;
};

}  // namespace shardmlp
