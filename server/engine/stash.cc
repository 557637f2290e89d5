#include "server/engine/stash.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {

// Below 2^53 however many follow, and not those of the server that was here before.
Stash::Stash(std::shared_ptr<StashMemory> memory, Metrics& metrics) : memory_(std::move(memory)), metrics_(metrics) {
  absl::BitGen random;
  next_ticket_ = absl::Uniform<int64_t>(random, 1, int64_t{1} << 52);
}

Stash::Kept Stash::Keep(const Call& call, Claim claim, const RowSize& row_size, int64_t tile_count) {
  // By division: the row count is whatever the client says.
  if (call.row_count < 1 || call.row_count > memory_->bytes() / row_size.x_bytes) return {};
  Entry entry{.call = call, .claim = claim, .users = 1, .bytes = {}, .rows = std::make_shared<KeptRows>()};
  entry.bytes.x_bytes = StashMemory::PieceBytes(call.row_count * row_size.x_bytes);
  entry.rows->x = TakeForX(entry.bytes.x_bytes, claim);
  if (entry.rows->x == nullptr) return {};
  entry.rows->non_finite_rows.assign(tile_count, -1);
  entry.rows->gate_up_ready.assign(tile_count, false);
  if (call.row_count <= (memory_->bytes() - entry.bytes.x_bytes) / row_size.gate_up_bytes) {
    const int64_t bytes = StashMemory::PieceBytes(call.row_count * row_size.gate_up_bytes);
    entry.rows->gate_up = TakeForGateUp(bytes, claim.reader);
    if (entry.rows->gate_up != nullptr) entry.bytes.gate_up_bytes = bytes;
  }
  AddBytes(entry.bytes.x_bytes + entry.bytes.gate_up_bytes);
  if (claim.pinned && claim.reader) readers_pinned_bytes_ += entry.bytes.x_bytes;
  const Kept kept{next_ticket_++, entry.rows};
  entries_.emplace(kept.ticket, std::move(entry));
  return kept;
}

absl::Status Stash::Full(const Call& call, const RowSize& row_size) const {
  return Error(
      absl::StatusCode::kFailedPrecondition, Reason::kStashFull,
      absl::StrCat("the stash has no room to pin ", call.row_count, " rows of layer ", call.layer, ", ",
                   row_size.x_bytes, " bytes each; it has ", memory_->bytes(), " bytes, of which tickets hold ", bytes_,
                   ": start the server with more --stash-bytes, or keep the input (keep_inputs=True)"));
}

absl::StatusOr<std::shared_ptr<KeptRows>> Stash::Find(int64_t ticket, const Call& call) {
  const auto entry = entries_.find(ticket);
  if (entry == entries_.end() || entry->second.call != call) {
    metrics_.CountTicket(TicketEvent::kMissed);
    return Error(
        absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing,
        absl::StrCat("the stash has no ticket ", ticket, " of session ", call.session_id, " for ", call.row_count,
                     " rows of ", Name(call.dtype), " of layer ", call.layer, "; send the same call with x"));
  }
  metrics_.CountTicket(TicketEvent::kHit);
  ++entry->second.users;
  return entry->second.rows;
}

void Stash::Finished(int64_t ticket, Pass pass, bool answered) {
  const auto entry = entries_.find(ticket);
  if (entry == entries_.end()) return;
  const bool used_up = pass == Pass::kForward ? !answered : answered && !entry->second.claim.pinned;
  if (used_up) return Erase(entry);
  --entry->second.users;
  if (pass == Pass::kForward) metrics_.CountTicket(TicketEvent::kGranted);
}

void Stash::Release(int64_t ticket, int64_t session_id) {
  const auto entry = entries_.find(ticket);
  if (entry != entries_.end() && entry->second.call.session_id == session_id) Erase(entry);
}

void Stash::ReleaseSession(int64_t session_id) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->second.call.session_id == session_id) Erase(entry);
    entry = next;
  }
}

void Stash::ReleaseAll() {
  while (!entries_.empty()) Erase(entries_.begin());
}

std::shared_ptr<void> Stash::TakeForGateUp(int64_t bytes, bool reader) {
  std::shared_ptr<void> piece = memory_->Take(bytes);
  for (auto oldest = entries_.end(); piece == nullptr; piece = memory_->Take(bytes)) {
    oldest = Oldest(reader, /*with_gate_up=*/true);
    if (oldest == entries_.end()) break;
    DropGateUp(oldest->second);
  }
  return piece;
}

std::shared_ptr<void> Stash::TakeForX(int64_t bytes, Claim claim) {
  if (claim.pinned && claim.reader && readers_pinned_bytes_ + bytes > memory_->bytes() / 2) return nullptr;
  std::shared_ptr<void> piece = TakeForGateUp(bytes, claim.reader);
  for (auto oldest = entries_.end(); piece == nullptr; piece = memory_->Take(bytes)) {
    oldest = Oldest(claim.reader, /*with_gate_up=*/false);
    if (oldest == entries_.end()) break;
    Erase(oldest);
  }
  return piece;
}

Stash::Entries::iterator Stash::Oldest(bool reader, bool with_gate_up) {
  return std::find_if(entries_.begin(), entries_.end(), [=](const auto& item) {
    const Entry& entry = item.second;
    if (entry.users > 0 || (reader && !entry.claim.reader)) return false;
    return with_gate_up ? entry.rows->gate_up != nullptr : !entry.claim.pinned;
  });
}

void Stash::Erase(Entries::iterator entry) {
  const auto& [call, claim, users, bytes, rows] = entry->second;
  AddBytes(-bytes.x_bytes - bytes.gate_up_bytes);
  if (claim.pinned && claim.reader) readers_pinned_bytes_ -= bytes.x_bytes;
  entries_.erase(entry);
}

// In a copy, since the device thread may still be at a tile of a call that was cancelled.
void Stash::DropGateUp(Entry& entry) {
  AddBytes(-std::exchange(entry.bytes.gate_up_bytes, 0));
  auto without = std::make_shared<KeptRows>();
  without->x = entry.rows->x;
  without->non_finite_rows = entry.rows->non_finite_rows;
  without->gate_up_ready.assign(without->non_finite_rows.size(), false);
  entry.rows = std::move(without);
}

void Stash::AddBytes(int64_t bytes) {
  bytes_ += bytes;
  metrics_.SetStashBytes(bytes_);
}

}  // namespace shardmlp
