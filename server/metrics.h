// Every series that a server exports, looked up once and kept by reference. A leaf: knows no other room.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardmlp {

// Where a tile's time goes.
enum class Stage { kReceive, kQueue, kCopyIn, kCompute, kCopyOut, kSend };
enum class Pass { kForward, kBackward };
enum class StepOutcome { kCommitted, kDiscarded, kAborted };
enum class StepPhase { kSeal, kSync, kApply };  // last seal waits for first; replicas sum; the optimizer runs
enum class MemoryUse { kWeights, kGradients, kMasterWeights, kOptimizer, kWorkspace, kStaging };

// Thread-safe; every method is cheap and takes no lock that is held for long.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  // Serves /metrics on `address` ("127.0.0.1:9100") until destroyed. UNAVAILABLE where it can't listen.
  absl::Status Expose(const std::string& address);
  // The text exposition, as /metrics gives it.
  std::string Text() const;

  void ObserveStage(Pass pass, Stage stage, absl::Duration duration);
  void AddRows(Pass pass, int64_t rows);
  void AddPayloadBytes(int64_t received, int64_t sent);
  // `useful` counts 3 GEMMs forward and 6 backward; `recomputed` the backward's 2 that run again.
  void AddFlops(double useful, double recomputed);
  void SetQueuedTiles(int64_t tiles);
  void SetOpenCalls(int64_t calls);
  void SetSessions(int64_t trainers, int64_t readers);
  void SetPlannedBytes(MemoryUse use, int64_t bytes);
  void SetStep(int64_t step, int64_t attempt);
  void CountStep(StepOutcome outcome);
  void ObserveStepPhase(StepPhase phase, absl::Duration duration);
  void CountRepeatedRows(int64_t rows);
  void CountNonFinite();

  // The gRPC server metrics that stock dashboards know. `method` is "Forward", `code` is "OK", `reason` from Reason.
  void RpcStarted(absl::string_view method);
  void RpcHandled(absl::string_view method, absl::string_view code, absl::string_view reason, absl::Duration duration);

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace shardmlp
