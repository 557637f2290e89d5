#include "server/sync/gloo_group.h"

#include <gloo/broadcast.h>
#include <gloo/context.h>
#include <gloo/transport/address.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/sync/gloo_abort.h"
#include "server/sync/gloo_ring.h"

namespace shardmlp {
namespace {

// Of one message of a broadcast, all of which a rank has before it passes it on.
constexpr int64_t kBroadcastBytes = 8 << 20;
// Of what is summed at once. Bounds the copies of what is not dense.
constexpr int64_t kSumBytes = 1 << 30;

// Other than the slots of collectives.
constexpr uint64_t kWatchSlot = uint64_t{0x53} << 56;
constexpr std::chrono::hours kForever(24 * 365);

std::chrono::milliseconds Milliseconds(absl::Duration duration) {
  return absl::ToChronoMilliseconds(std::max(duration, absl::Milliseconds(1)));
}

// Gloo's messages begin with a file and a line of its own.
std::string Message(const std::exception& thrown) {
  std::string what = thrown.what();
  if (what.front() == '[') what.erase(0, what.find(']') + 1);
  while (!what.empty() && what.front() == ' ') what.erase(0, 1);
  return what;
}

absl::Status Failure(int size, const std::exception& thrown) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost,
               absl::StrCat("collective of ", size, " replicas failed: ", Message(thrown)));
}

// A context whose peers are found by addresses that the owner brings, instead of through a store of Gloo's.
class MeshContext final : public gloo::Context {
 public:
  MeshContext(const GlooDevice& device, std::shared_ptr<AbortableTransport> transport)
      : gloo::Context(transport->rank, transport->size) {
    device_ = device;
    transportContext_ = std::move(transport);
  }
};

}  // namespace

absl::StatusOr<GlooDevice> OpenGlooDevice(const std::string& host) {
  struct sigaction old = {};
  if (sigaction(SIGPIPE, nullptr, &old) == 0 && old.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
  try {
    gloo::transport::tcp::attr attr;
    attr.hostname = host;
    return gloo::transport::tcp::CreateDevice(attr);
  } catch (const std::exception& thrown) {
    return absl::UnavailableError(absl::StrCat("can't listen for other replicas at ", host, ": ", Message(thrown)));
  }
}

GlooGroup::GlooGroup(int rank, int size, const GlooOptions& options) : rank_(rank), size_(size), options_(options) {}

GlooGroup::~GlooGroup() {
  if (!watcher_.joinable()) return;
  watch_->abortWaitRecv();
  watcher_.join();
}

absl::StatusOr<std::shared_ptr<GlooGroup>> GlooGroup::Listen(const GlooDevice& device, int rank, int size,
                                                             const GlooOptions& options) {
  std::shared_ptr<GlooGroup> group(new GlooGroup(rank, size, options));
  SHARDMLP_RETURN_IF_ERROR(group->Guarded([&] { group->Listen(device); }));
  return group;
}

template <typename Run>
absl::Status GlooGroup::Guarded(Run run) {
  SHARDMLP_RETURN_IF_ERROR(failure());
  try {
    run();
  } catch (const std::exception& thrown) {
    Abort(Failure(size_, thrown));
  }
  return failure();
}

void GlooGroup::Listen(const GlooDevice& device) {
  const auto transport = device->createContext(rank_, size_);
  // Gloo waits for a connection five times as long as its pairs are told.
  transport->setTimeout(Milliseconds(options_.connect_timeout / 5));
  addresses_.resize(size_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::vector<char> address = transport->createPair(peer)->address().bytes();
    addresses_[peer].assign(address.begin(), address.end());
  }
  transport->setTimeout(Milliseconds(options_.timeout));
  transport_ = std::make_shared<AbortableTransport>(transport);
  context_ = std::make_shared<MeshContext>(device, transport_);
  context_->setTimeout(Milliseconds(options_.timeout));
}

absl::Status GlooGroup::Connect(absl::Span<const std::string> peers) {
  if (peers.size() != addresses_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(peers.size(), " addresses for ", size_, " replicas"));
  }
  return Guarded([&] {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) context_->getPair(peer)->connect({peers[peer].begin(), peers[peer].end()});
    }
    watch_ = context_->createUnboundBuffer(&unsent_, sizeof(unsent_));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) watch_->recv(peer, kWatchSlot);
    }
    watcher_ = std::thread([this] { Watch(); });
  });
}

void GlooGroup::Watch() {
  try {
    watch_->waitRecv(kForever);
  } catch (const std::exception& thrown) {
    // After a time-out here, of which the collective itself tells more.
    if (Message(thrown) == "Application timeout caused pair closure") return;
    Abort(Failure(size_, thrown));
  }
}

absl::Status GlooGroup::AllReduceSum(absl::Span<const MatrixView> matrices) {
  for (const MatrixView& matrix : matrices) {
    if (matrix.dtype == DType::kF32 || matrix.dtype == DType::kF64) continue;
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType,
                 absl::StrCat("sum of ", matrix.ToString(), ", expected f32 or f64"));
  }
  const std::vector<Piece> pieces = CutIntoPieces(matrices);
  return Guarded([&] {
    for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
      int64_t bytes = 0;
      for (; end < pieces.size() && pieces[end].front().dtype == pieces[begin].front().dtype && bytes < kSumBytes;
           ++end) {
        bytes += ByteCount(pieces[end]);
      }
      SumPieces(absl::MakeSpan(pieces).subspan(begin, end - begin));
    }
  });
}

void GlooGroup::SumPieces(absl::Span<const Piece> pieces) {
  std::deque<PieceBlock> blocks;
  std::vector<MemoryBlock> memory;
  for (const Piece& piece : pieces) {
    const PieceBlock& block = blocks.emplace_back(piece);
    memory.push_back({block.data(), block.byte_count()});
  }
  RingSum(*context_, pieces.front().front().dtype, memory, ++tag_, Milliseconds(options_.timeout));
  for (const PieceBlock& block : blocks) block.Store();
}

absl::Status GlooGroup::Broadcast(int root, absl::Span<const MatrixView> matrices) {
  if (root < 0 || root >= size_) {
    return absl::InvalidArgumentError(absl::StrCat("broadcast from rank ", root, " of ", size_));
  }
  return Guarded([&] {
    for (const Piece& piece : CutIntoPieces(matrices)) {
      const PieceBlock block(piece);
      for (int64_t begin = 0; begin < block.byte_count(); begin += kBroadcastBytes) {
        BroadcastBlock(root, static_cast<char*>(block.data()) + begin,
                       std::min(kBroadcastBytes, block.byte_count() - begin));
      }
      if (rank_ != root) block.Store();
    }
  });
}

void GlooGroup::BroadcastBlock(int root, void* data, int64_t byte_count) {
  gloo::BroadcastOptions options(context_);
  options.setOutput(static_cast<char*>(data), byte_count);
  options.setRoot(root);
  options.setTag(++tag_);
  options.setTimeout(Milliseconds(options_.timeout));
  gloo::broadcast(options);
}

void GlooGroup::Abort(absl::Status reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = std::move(reason);
  }
  if (transport_ != nullptr) transport_->Abort();
}

absl::Status GlooGroup::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

}  // namespace shardmlp
