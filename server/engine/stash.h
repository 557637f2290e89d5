// What forwards leave on the server for their backward, under tickets.
//
// A forward that asks for it leaves its x, in the dtype of the wire, and where there is room its [G | U], in the
// compute dtype. A later forward may take the room of older ones, since backward comes in the opposite order: first of
// their [G | U], then of their x. So what nobody comes back for goes by itself. A backward whose ticket is gone sends
// x. A pinned x stays, since whoever sent it has it no more.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/matrix.h"
#include "server/engine/stash_memory.h"
#include "server/metrics.h"

namespace shardmlp {

// Rows of one call. The memory stays for as long as anyone owns it, whatever becomes of the ticket.
struct KeptRows {
  std::shared_ptr<void> x;        // [row_count, H], dtype of the wire
  std::shared_ptr<void> gate_up;  // [row_count, 2I] or [row_count, I], compute dtype; null where not kept

  // For the device thread, by tile.
  std::vector<int64_t> non_finite_rows;  // the first, in the call, with a NaN or infinity in x; -1 for none
  std::vector<bool> gate_up_ready;       // gate_up holds it, and no backward has used it up
};

// Thread-compatible; the engine's lock guards it.
class Stash {
 public:
  // What a ticket is for. A backward finds only what was kept for the very same.
  struct Call {
    int64_t session_id = 0;
    int layer = 0;
    int64_t row_count = 0;
    DType dtype = DType::kF32;  // on the wire
    friend bool operator==(const Call&, const Call&) = default;
  };
  struct Claim {
    bool pinned = false;  // x makes no room for others; what is kept of [G | U] does
    bool reader = false;  // takes the room of other readers alone, and pins half of all at most
  };
  struct RowSize {
    int64_t x_bytes = 0;
    int64_t gate_up_bytes = 0;
  };
  struct Kept {
    int64_t ticket = 0;
    std::shared_ptr<KeptRows> rows;  // null where there is no room
  };

  // `metrics` must outlive this.
  Stash(std::shared_ptr<StashMemory> memory, Metrics& metrics);

  // Room for a forward's rows, in use until Finished.
  Kept Keep(const Call& call, Claim claim, const RowSize& row_size, int64_t tile_count);
  // Why there is none: FAILED_PRECONDITION (STASH_FULL).
  absl::Status Full(const Call& call, const RowSize& row_size) const;
  // What `ticket` names, in use until Finished. FAILED_PRECONDITION (TICKET_MISSING) where it is not here, or is
  // another call's.
  absl::StatusOr<std::shared_ptr<KeptRows>> Find(int64_t ticket, const Call& call);
  // The call with this ticket, which may be gone, is over. A forward that was not `answered` leaves nothing, and a
  // backward that was has used up a ticket that is not pinned.
  void Finished(int64_t ticket, Pass pass, bool answered);
  // The session, where the ticket is its own, needs it no more.
  void Release(int64_t ticket, int64_t session_id);
  // The session is over.
  void ReleaseSession(int64_t session_id);
  // The step's attempt is over.
  void ReleaseAll();

 private:
  struct Entry {
    Call call;
    Claim claim;
    int users = 0;  // open calls; with any, it keeps its room
    RowSize bytes;  // of all rows
    std::shared_ptr<KeptRows> rows;
  };
  using Entries = std::map<int64_t, Entry>;

  // Takes a piece, letting go of what lies there, oldest first. Null where that does not make room.
  std::shared_ptr<void> TakeForGateUp(int64_t bytes, bool reader);
  std::shared_ptr<void> TakeForX(int64_t bytes, Claim claim);
  // The oldest that has to make room for a forward, at all or of its [G | U].
  Entries::iterator Oldest(bool reader, bool with_gate_up);
  void Erase(Entries::iterator entry);
  void DropGateUp(Entry& entry);
  void AddBytes(int64_t bytes);

  const std::shared_ptr<StashMemory> memory_;
  Metrics& metrics_;
  Entries entries_;  // by ticket, which count up
  int64_t next_ticket_;
  int64_t bytes_ = 0;                 // that tickets hold
  int64_t readers_pinned_bytes_ = 0;  // of x
};

}  // namespace shardmlp
