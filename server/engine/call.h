// One forward or backward of one layer on its way through the engine: rows come in by shards, are joined into tiles,
// computed on the device thread, and go out tile by tile.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/matrix.h"

namespace shardmlp {

// Whether a forward leaves its x in the stash, for a backward.
enum class KeepInput {
  kNo,
  kIfRoom,  // until that backward is answered, or a later forward needs the room
  kPinned,  // until it is released; refused where there is no room
};

struct ForwardSpec {
  int64_t session_id = 0;
  int layer = 0;
  int64_t row_count = 0;
  DType dtype = DType::kF32;  // on the wire
  KeepInput keep_input = KeepInput::kNo;
  std::vector<int64_t> released_tickets = {};  // that no backward will name any more
};

struct BackwardSpec {
  int64_t session_id = 0;
  int layer = 0;
  int64_t row_count = 0;
  DType dtype = DType::kF32;  // on the wire
  int64_t call_id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  int64_t weights_version = 0;
  bool input_gradient = true;
  bool weight_gradient = true;
  int64_t ticket = 0;  // of the x that a forward left in the stash; 0: the shards carry x
  std::vector<int64_t> released_tickets = {};
};

// Bytes that lie somewhere in pieces; a received payload.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual int64_t size() const = 0;
  // Copies bytes [offset, offset + count) to `to`. They must exist.
  virtual void CopyTo(int64_t offset, int64_t count, void* to) const = 0;
};

// Finished rows: [row_count, columns] contiguous in the call's dtype, at `data` for as long as `hold` lives. Dropping
// every copy of `hold` gives the memory back to the call; until then the call gets no further than its staging allows,
// which is how a slow reader slows its own call and nothing else.
struct CallResult {
  int64_t row_offset = 0;
  int64_t row_count = 0;
  const char* data = nullptr;
  int64_t byte_count = 0;
  std::shared_ptr<void> hold;
};

struct CallSummary {
  int64_t row_count = 0;
  int64_t weights_version = 0;
  int64_t repeated_row_count = 0;  // rows of a backward that an earlier try had counted
  int64_t ticket = 0;              // that a forward left its x under; 0: none
  bool gate_up_kept = false;       // G and U as well
};

// Who started the call; the stream. Its methods are called one at a time, from the device thread or from inside Place
// and End, never with a lock held, and must not block. After OnFinished nothing more is called.
class CallSink {
 public:
  virtual ~CallSink() = default;
  // There is room again after Place took less than it was given.
  virtual void OnRoom() = 0;
  // In ascending row order without gap. Not called for a backward without input gradient.
  virtual void OnResult(CallResult result) = 0;
  // Once, last: the summary after every row was answered, or why not.
  virtual void OnFinished(absl::StatusOr<CallSummary> summary) = 0;
};

// Place, End and Cancel are for one thread at a time (a stream's reactions are). The engine holds the call for as long
// as tiles of it are in flight, so the last shared_ptr may be dropped at any time after Cancel or OnFinished.
class Call {
 public:
  virtual ~Call() = default;

  // Takes rows [row_offset, row_offset + row_count) minus the first `skip`, of x [row_count, H] and, for a backward,
  // dy [row_count, O] (null for a forward; and where the header has a ticket, x is empty), as many as there is room for
  // now, and returns how many. Where that is fewer than row_count - skip, OnRoom follows, and the caller places the
  // rest with a larger `skip`. INVALID_ARGUMENT for rows that are not the next ones or too many, or a payload of the
  // wrong size.
  virtual absl::StatusOr<int64_t> Place(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                        const ByteSource* dy) = 0;
  // All rows were placed. INVALID_ARGUMENT where `row_count` or the rows placed are not the header's.
  virtual absl::Status End(int64_t row_count) = 0;
  // The client is gone or broke the protocol. Tiles that the device has not begun are dropped. No sink method runs
  // after Cancel returned, except that OnFinished may have been called already. Cancel waits for a sink method that is
  // running on another thread, so hold no lock that one takes. Repeats do nothing.
  virtual void Cancel() = 0;
};

}  // namespace shardmlp
