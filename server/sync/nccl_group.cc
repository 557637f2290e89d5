#include "server/sync/nccl_group.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/handles.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// How long the thread that waits sleeps between two looks.
constexpr absl::Duration kPollInterval = absl::Microseconds(50);
// How long a group that is not wanted any more waits for the others to be done with it too.
constexpr absl::Duration kPartingTime = absl::Seconds(2);

// Destroyed by ncclCommAbort, which waits for nobody: what is in flight then is not wanted.
using Communicator = std::unique_ptr<std::remove_pointer_t<ncclComm_t>, Destroy<ncclCommAbort>>;

absl::Status Lost(absl::string_view message) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, message);
}

// A call that only begins what it is for is in progress, and no failure.
absl::Status NcclStatus(ncclResult_t result, absl::string_view call) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  return Lost(absl::StrCat(call, ": ", ncclGetErrorString(result)));
}

absl::Status CheckDense(const MatrixView& matrix) {
  if (matrix.contiguous()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
               absl::StrCat(matrix.ToString(), " has a row stride of ", matrix.row_stride, ", expected dense rows"));
}

absl::Status CheckSummed(const MatrixView& matrix) {
  if (matrix.dtype == DType::kF32 || matrix.dtype == DType::kF64) return CheckDense(matrix);
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType,
               absl::StrCat("sum of ", matrix.ToString(), ", expected f32 or f64"));
}

class NcclGroup final : public PeerGroup {
 public:
  static absl::StatusOr<std::shared_ptr<PeerGroup>> Listen(const NcclOptions& options, int rank, int size) {
    if (size < 2 || rank < 0 || rank >= size) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrCat("rank ", rank, " of ", size, " replicas"));
    }
    auto group = std::make_shared<NcclGroup>(options, rank, size);
    if (rank == 0) SHARDMLP_RETURN_IF_ERROR(group->MakeId());
    return group;
  }
  // Listen's.
  NcclGroup(const NcclOptions& options, int rank, int size) : options_(options), rank_(rank), size_(size) {
    addresses_.resize(size);
  }

  // The others may still be taking what this rank has sent them.
  ~NcclGroup() override {
    if (communicator_ == nullptr || !failure().ok() || !MakeCurrent().ok()) return;
    absl::Status status = NcclStatus(ncclCommFinalize(communicator_.get()), "ncclCommFinalize");
    if (status.ok()) status = Await("parting", absl::Now() + kPartingTime, [this] { return Settled(); });
    if (status.ok()) ncclCommDestroy(communicator_.release());
  }

  absl::Status Connect(absl::Span<const std::string> peers) override {
    absl::Status status = TryConnect(peers);
    if (!status.ok()) Fail(status);
    return status;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool device_memory() const override { return true; }

  absl::Status AllReduceSum(absl::Span<const MatrixView> matrices) override {
    for (const MatrixView& matrix : matrices) SHARDMLP_RETURN_IF_ERROR(CheckSummed(matrix));
    return Run(matrices, [this](const MatrixView& m) {
      const ncclDataType_t type = m.dtype == DType::kF64 ? ncclFloat64 : ncclFloat32;
      return ncclAllReduce(m.data, m.data, static_cast<size_t>(m.element_count()), type, ncclSum, communicator_.get(),
                           stream_.get());
    });
  }

  absl::Status Broadcast(int root, absl::Span<const MatrixView> matrices) override {
    if (root < 0 || root >= size()) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrCat("broadcast from rank ", root, " of ", size()));
    }
    for (const MatrixView& matrix : matrices) SHARDMLP_RETURN_IF_ERROR(CheckDense(matrix));
    return Run(matrices, [this, root](const MatrixView& m) {
      return ncclBroadcast(m.data, m.data, static_cast<size_t>(m.byte_count()), ncclUint8, root, communicator_.get(),
                           stream_.get());
    });
  }

  void Abort(absl::Status reason) override {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = std::move(reason);
  }

  absl::Status failure() const override {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  // Rank 0's, by which all find each other: each of the others' addresses of it.
  absl::Status MakeId() {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id_), "ncclGetUniqueId"));
    for (int peer = 1; peer < size(); ++peer) addresses_[peer].assign(id_.internal, sizeof(id_.internal));
    return absl::OkStatus();
  }

  absl::Status TryConnect(absl::Span<const std::string> peers) {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_ASSIGN_OR_RETURN(stream_, MakeStream());
    SHARDMLP_ASSIGN_OR_RETURN(done_, MakeEvent(cudaEventDisableTiming));
    if (rank() > 0) {
      const absl::string_view id = peers.empty() ? absl::string_view() : peers[0];
      if (id.size() != sizeof(id_.internal)) {
        return Lost(absl::StrCat("rank 0's id has ", id.size(), " bytes, expected ", sizeof(id_.internal)));
      }
      std::memcpy(id_.internal, id.data(), id.size());
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // so that this thread can watch, and give up
    ncclComm_t communicator = nullptr;
    const ncclResult_t result = ncclCommInitRankConfig(&communicator, size(), id_, rank(), &config);
    communicator_.reset(communicator);
    SHARDMLP_RETURN_IF_ERROR(NcclStatus(result, "ncclCommInitRankConfig"));
    return Await("connecting", absl::Now() + options_.connect_timeout, [this] { return Settled(); });
  }

  // What is in flight is not wanted: the others' collective ends with it, or with their own watch.
  void Fail(absl::Status why) {
    Abort(std::move(why));
    communicator_.reset();
  }

  // Enqueues a collective on each matrix, as one, and waits for it.
  template <typename Enqueue>
  absl::Status Run(absl::Span<const MatrixView> matrices, const Enqueue& enqueue) {
    absl::Status status = failure();
    if (status.ok()) status = MakeCurrent();
    if (status.ok()) status = EnqueueAll(matrices, enqueue);
    const absl::Time deadline = absl::Now() + options_.timeout;
    if (status.ok()) status = Await("a collective", deadline, [this] { return Settled(); });
    if (status.ok()) status = ToStatus(cudaEventRecord(done_.get(), stream_.get()), "cudaEventRecord");
    if (status.ok()) status = Await("a collective", deadline, [this] { return Done(); });
    if (status.ok()) return status;
    Fail(status);
    return failure();
  }

  template <typename Enqueue>
  absl::Status EnqueueAll(absl::Span<const MatrixView> matrices, const Enqueue& enqueue) {
    SHARDMLP_RETURN_IF_ERROR(NcclStatus(ncclGroupStart(), "ncclGroupStart"));
    absl::Status status;
    for (const MatrixView& matrix : matrices) {
      if (status.ok() && !matrix.empty()) status = NcclStatus(enqueue(matrix), "collective");
    }
    status.Update(NcclStatus(ncclGroupEnd(), "ncclGroupEnd"));
    return status;
  }

  // Polls until `done` says so, or fails.
  template <typename IsDone>
  absl::Status Await(absl::string_view what, absl::Time deadline, const IsDone& done) {
    while (true) {
      SHARDMLP_RETURN_IF_ERROR(failure());
      SHARDMLP_ASSIGN_OR_RETURN(const bool is_done, done());
      if (is_done) return absl::OkStatus();
      if (absl::Now() > deadline) {
        return Lost(absl::StrCat(what, " of ", size(), " replicas did not end in time; rank ", rank(), " gives up"));
      }
      absl::SleepFor(kPollInterval);
    }
  }

  // Whether the communicator has begun all that it was told to.
  absl::StatusOr<bool> Settled() {
    ncclResult_t state = ncclSuccess;
    SHARDMLP_RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(communicator_.get(), &state), "ncclCommGetAsyncError"));
    SHARDMLP_RETURN_IF_ERROR(NcclStatus(state, "a peer, or the way to it"));
    return state == ncclSuccess;
  }

  // Whether the stream is done with it.
  absl::StatusOr<bool> Done() {
    const cudaError_t state = cudaEventQuery(done_.get());
    if (state != cudaErrorNotReady) {
      SHARDMLP_RETURN_IF_ERROR(ToStatus(state, "cudaEventQuery"));
      return true;
    }
    cudaGetLastError();  // else the thread's next launch would be taken for it
    SHARDMLP_RETURN_IF_ERROR(Settled().status());
    return false;
  }

  absl::Status MakeCurrent() const { return ToStatus(cudaSetDevice(options_.device), "cudaSetDevice"); }

  const NcclOptions options_;
  const int rank_;
  const int size_;
  ncclUniqueId id_ = {};
  // Of the thread that connects, and then of the one that runs collectives.
  StreamHandle stream_;
  EventHandle done_;
  Communicator communicator_;  // null after a failure

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<Transport> NcclTransport(const NcclOptions& options) {
  int version = 0;
  if (const ncclResult_t result = ncclGetVersion(&version); result != ncclSuccess) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed,
                 absl::StrCat("NCCL: ", ncclGetErrorString(result)));
  }
  return Transport{"nccl", [options](int rank, int size) { return NcclGroup::Listen(options, rank, size); }};
}

}  // namespace shardmlp
