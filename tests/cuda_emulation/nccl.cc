// NCCL over the emulated devices, its ranks threads of one process: a collective's part on a stream gives what the rank
// has, and the stream goes on once every rank's has.
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_emulation/machine.h"

using shardmlp::emulation::Machine;
using shardmlp::emulation::Mark;

namespace {

// The same on every rank, or they disagree.
struct Shape {
  int root;  // -1: a sum
  size_t count;
  ncclDataType_t type;
  bool operator==(const Shape&) const = default;
};

// One that all ranks make together.
struct Collective {
  Shape shape;
  std::map<int, std::vector<char>> given = {};        // by rank
  std::map<int, std::shared_ptr<Mark>> goes_on = {};  // by rank: what its stream waits for
  std::vector<char> result = {};                      // once all have given
};

struct Peers {
  int size;
  std::map<int, ncclComm_t> ranks;
  std::vector<std::shared_ptr<Collective>> collectives;  // in each rank's order
  int finalized = 0;                                     // ranks
  bool failed = false;
};

size_t SizeOf(ncclDataType_t type) { return type == ncclFloat64 ? 8 : type == ncclFloat32 ? 4 : 1; }

template <typename T>
void Add(const std::vector<char>& from, std::vector<char>& to) {
  for (size_t i = 0; i < to.size(); i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, &to[i], sizeof(T));
    std::memcpy(&b, &from[i], sizeof(T));
    a += b;
    std::memcpy(&to[i], &a, sizeof(T));
  }
}

void Complete(Collective& collective) {
  collective.result = collective.given[std::max(collective.shape.root, 0)];
  for (const auto& [rank, values] : collective.given) {
    if (collective.shape.root >= 0 || rank == 0) continue;
    collective.shape.type == ncclFloat64 ? Add<double>(values, collective.result)
                                         : Add<float>(values, collective.result);
  }
  for (const auto& [rank, mark] : collective.goes_on) mark->done = true;
}

std::map<std::string, std::shared_ptr<Peers>>& Meetings() {
  static auto* const meetings = new std::map<std::string, std::shared_ptr<Peers>>();
  return *meetings;
}

int ids_made = 0;
thread_local int group_depth = 0;

}  // namespace

struct ncclComm {
  int rank;
  int device;
  std::shared_ptr<Peers> peers;
  size_t made = 0;  // collectives
  bool finalized = false;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
};

namespace {

// Enqueues this rank's part of its next collective. What was freed meanwhile breaks the device.
ncclResult_t Enqueue(ncclComm_t comm, const Shape& shape, const void* from, void* to, cudaStream_t stream) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  if (machine.Enter() != cudaSuccess) return ncclInvalidUsage;
  Peers& peers = *comm->peers;
  if (comm->made == peers.collectives.size()) {
    peers.collectives.push_back(std::make_shared<Collective>(Collective{shape}));
  }
  const std::shared_ptr<Collective> collective = peers.collectives[comm->made++];
  if (!(collective->shape == shape)) {
    machine.Report("NCCL: ranks make different collectives");
    peers.failed = true;
    return ncclInvalidUsage;
  }
  const size_t bytes = shape.count * SizeOf(shape.type);
  const auto usable = [&machine, stream, bytes](const void* data) {
    if (machine.Usable(stream, data, bytes, "NCCL")) return true;
    machine.Break(cudaErrorIllegalAddress, "a collective failed");
    return false;
  };
  if (!usable(from) || !usable(to)) return ncclInvalidArgument;
  const auto mark = collective->goes_on[comm->rank] = std::make_shared<Mark>(Mark{nullptr});
  const auto give = [=, rank = comm->rank, size = peers.size, aborted = comm->aborted](bool /*backwards*/) {
    if (*aborted || !usable(from)) return;
    const char* const data = static_cast<const char*>(from);
    collective->given[rank].assign(data, data + bytes);
    if (static_cast<int>(collective->given.size()) == size) Complete(*collective);
  };
  const auto take = [=, aborted = comm->aborted](bool /*backwards*/) {
    if (!*aborted && usable(to)) std::memcpy(to, collective->result.data(), bytes);
  };
  machine.Enqueue(stream, {.run = give});
  machine.Enqueue(stream, {.awaits = mark});
  machine.Enqueue(stream, {.run = take});
  return ncclInProgress;
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "ncclSuccess";
    case ncclInvalidArgument: return "ncclInvalidArgument";
    case ncclInvalidUsage: return "ncclInvalidUsage";
    case ncclRemoteError: return "ncclRemoteError";
    case ncclInProgress: return "ncclInProgress";
  }
  return "?";
}

ncclResult_t ncclGetVersion(int* version) {
  *version = 0;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(Machine::Get().mutex);
  std::snprintf(id->internal, sizeof(id->internal), "emulated %d", ++ids_made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  if (config->blocking != 0) return ncclInvalidUsage;
  std::shared_ptr<Peers>& peers = Meetings()[std::string(id.internal, sizeof(id.internal))];
  if (peers == nullptr) peers = std::make_shared<Peers>(Peers{size, {}, {}});
  const int device = shardmlp::emulation::CurrentDevice();
  for (const auto& [other, other_comm] : peers->ranks) {
    if (other == rank || (other_comm != nullptr && other_comm->device == device)) {
      machine.Report("NCCL: two ranks of one number, or on one device");
      return ncclInvalidUsage;
    }
  }
  if (peers->size != size) return ncclInvalidUsage;
  *comm = peers->ranks[rank] = new ncclComm{rank, device, peers};
  ++machine.object_count();
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const std::lock_guard lock(Machine::Get().mutex);
  const Peers& peers = *comm->peers;
  if (peers.failed) {
    *error = ncclRemoteError;
  } else {
    const int there = comm->finalized ? peers.finalized : static_cast<int>(peers.ranks.size());
    *error = there == peers.size ? ncclSuccess : ncclInProgress;
  }
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const std::lock_guard lock(Machine::Get().mutex);
  comm->finalized = true;
  ++comm->peers->finalized;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  comm->peers->ranks[comm->rank] = nullptr;
  delete comm;
  --machine.object_count();
  return ncclSuccess;
}

// What waits for it on this rank's stream goes on, with nothing; the others hear of it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const std::lock_guard lock(Machine::Get().mutex);
    for (const auto& collective : comm->peers->collectives) {
      const auto mark = collective->goes_on.find(comm->rank);
      if (mark != collective->goes_on.end()) mark->second->done = true;
    }
    *comm->aborted = true;
    comm->peers->failed = true;
  }
  return ncclCommDestroy(comm);
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  --group_depth;
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t /*op*/,
                           ncclComm_t comm, cudaStream_t stream) {
  return Enqueue(comm, {-1, count, type}, from, to, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return Enqueue(comm, {root, count, type}, from, to, stream);
}
