// A PeerGroup over TCP, from host memory to host memory, by Gloo.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/sync/peer_group.h"
#include "server/sync/pieces.h"
#include "server/sync/replica_group.h"

namespace gloo {
class Context;
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo

namespace shardmlp {

class AbortableTransport;
using GlooDevice = std::shared_ptr<gloo::transport::Device>;

// Has the thread that does the sockets' work, for any number of groups. They listen at `host`, a name or number of this
// machine, on ports that the system chooses. From then on the process ignores SIGPIPE, which Gloo's writes would raise.
absl::StatusOr<GlooDevice> OpenGlooDevice(const std::string& host);

struct GlooOptions {
  absl::Duration connect_timeout = absl::Seconds(20);
  // Of a wait for the next MiB of a peer, not of a whole collective.
  absl::Duration timeout = absl::Seconds(60);
};

class GlooGroup final : public PeerGroup {
 public:
  static absl::StatusOr<std::shared_ptr<GlooGroup>> Listen(const GlooDevice& device, int rank, int size,
                                                           const GlooOptions& options);
  ~GlooGroup() override;

  absl::Status Connect(absl::Span<const std::string> peers) override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool device_memory() const override { return false; }

  // f32 and f64.
  absl::Status AllReduceSum(absl::Span<const MatrixView> matrices) override;
  // Any dtype, by its bytes.
  absl::Status Broadcast(int root, absl::Span<const MatrixView> matrices) override;
  void Abort(absl::Status reason) override;
  absl::Status failure() const override;

 private:
  GlooGroup(int rank, int size, const GlooOptions& options);

  // Runs what may throw. Its failure is the group's.
  template <typename Run>
  absl::Status Guarded(Run run);
  void Listen(const GlooDevice& device);
  // Waits until a connection breaks, and then aborts: so a collective that waits for another rank fails too.
  void Watch();
  void SumPieces(absl::Span<const Piece> pieces);
  void BroadcastBlock(int root, void* data, int64_t byte_count);

  const int rank_;
  const int size_;
  const GlooOptions options_;
  std::shared_ptr<gloo::Context> context_;
  std::shared_ptr<AbortableTransport> transport_;
  uint32_t tag_ = 0;  // of the last collective
  char unsent_ = 0;
  std::unique_ptr<gloo::transport::UnboundBuffer> watch_;  // for what nobody sends
  std::thread watcher_;

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
