#include "server/engine/stash.h"

#include <algorithm>
#include <functional>
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

Stash::Kept Stash::Keep(const Call& call, const Claim& claim, const RowSize& row_size, int64_t tile_count) {
  EraseIf([&](const Entry& entry) {
    return claim.call_id != 0 && entry.claim.call_id == claim.call_id && entry.call.session_id == call.session_id;
  });
  // By division: the row count is whatever the client says.
  const int64_t share = memory_->ShareBytes(claim.reader);
  if (call.row_count < 1 || call.row_count > share / row_size.x_bytes) return {};
  Entry entry{.call = call, .claim = claim, .users = 1, .bytes = {}, .rows = std::make_shared<KeptRows>()};
  entry.bytes.x_bytes = StashMemory::PieceBytes(call.row_count * row_size.x_bytes);
  if (entry.bytes.x_bytes > share) return {};
  entry.rows->x = TakeForX(entry.bytes.x_bytes, claim.reader);
  if (entry.rows->x == nullptr) return {};
  entry.rows->non_finite_rows.assign(tile_count, -1);
  entry.rows->gate_up_ready.assign(tile_count, false);
  if (call.row_count <= (share - entry.bytes.x_bytes) / row_size.gate_up_bytes) {
    const int64_t bytes = StashMemory::PieceBytes(call.row_count * row_size.gate_up_bytes);
    entry.rows->gate_up = TakeForGateUp(bytes, claim.reader);
    if (entry.rows->gate_up != nullptr) entry.bytes.gate_up_bytes = bytes;
  }
  AddBytes(entry.bytes.x_bytes + entry.bytes.gate_up_bytes);
  const Kept kept{next_ticket_++, entry.rows};
  entries_.emplace(kept.ticket, std::move(entry));
  return kept;
}

absl::Status Stash::Full(const Call& call, const Claim& claim, const RowSize& row_size) const {
  const int64_t share = memory_->ShareBytes(claim.reader);
  int64_t pinned = 0;
  for (const auto& [ticket, entry] : entries_) {
    if (entry.claim.pinned && (entry.claim.reader || !claim.reader)) pinned += entry.bytes.x_bytes;
  }
  const int64_t in_use = memory_->lent_bytes(claim.reader) - pinned;
  const bool fits = call.row_count <= (share - pinned) / row_size.x_bytes;
  const std::string what = absl::StrCat("the stash has no room to pin ", call.row_count, " rows of layer ", call.layer,
                                        ", ", row_size.x_bytes, " bytes each; ");
  if (fits && in_use > 0) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                 absl::StrCat(what, "calls that are not over use ", in_use, " bytes; try again later"));
  }
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kStashFull,
               absl::StrCat(what, "of its ", share, " bytes", claim.reader ? " for readers, " : ", ", pinned,
                            " are pinned: start the server with more --stash-bytes, or keep the input "
                            "(keep_inputs=True)"));
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
  EraseIf([=](const Entry& entry) { return entry.call.session_id == session_id; });
}

void Stash::ReleaseAll() {
  EraseIf([](const Entry&) { return true; });
}

std::shared_ptr<void> Stash::TakeForX(int64_t bytes, bool reader) {
  const auto take = [&] { return memory_->Take(bytes, StashMemory::End::kFront, reader); };
  std::shared_ptr<void> piece = take();
  for (auto next = entries_.end(); piece == nullptr && (next = ForemostGateUp(reader)) != entries_.end();) {
    DropGateUp(next->second);
    piece = take();
  }
  for (auto next = entries_.end(); piece == nullptr && (next = OldestX(reader)) != entries_.end();) {
    Erase(next);
    piece = take();
  }
  return piece;
}

std::shared_ptr<void> Stash::TakeForGateUp(int64_t bytes, bool reader) {
  const auto take = [&] { return memory_->Take(bytes, StashMemory::End::kBack, reader); };
  std::shared_ptr<void> piece = take();
  for (auto next = entries_.end(); piece == nullptr && (next = OldestGateUp(reader)) != entries_.end();) {
    DropGateUp(next->second);
    piece = take();
  }
  return piece;
}

Stash::Entries::iterator Stash::OldestX(bool reader) {
  return std::find_if(entries_.begin(), entries_.end(), [=, this](const auto& item) {
    return MakesRoom(item.second, reader) && !item.second.claim.pinned;
  });
}

Stash::Entries::iterator Stash::OldestGateUp(bool reader) {
  return std::find_if(entries_.begin(), entries_.end(), [=, this](const auto& item) {
    return MakesRoom(item.second, reader) && item.second.rows->gate_up != nullptr;
  });
}

Stash::Entries::iterator Stash::ForemostGateUp(bool reader) {
  const auto gate_up = [](Entries::iterator entry) { return entry->second.rows->gate_up.get(); };
  auto foremost = OldestGateUp(reader);
  for (auto entry = foremost; entry != entries_.end(); ++entry) {
    const bool makes_room = MakesRoom(entry->second, reader) && gate_up(entry) != nullptr;
    if (makes_room && std::less<>()(gate_up(entry), gate_up(foremost))) foremost = entry;
  }
  return foremost;
}

void Stash::Erase(Entries::iterator entry) {
  const RowSize& bytes = entry->second.bytes;
  AddBytes(-bytes.x_bytes - bytes.gate_up_bytes);
  entries_.erase(entry);
}

void Stash::EraseIf(absl::FunctionRef<bool(const Entry&)> condition) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (condition(entry->second)) Erase(entry);
    entry = next;
  }
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
