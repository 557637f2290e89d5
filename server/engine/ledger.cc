#include "server/engine/ledger.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// What an entry takes at most. A hash map's: two tables while it grows, the new one half empty. A tile's: two arrays
// while they grow, the new one half empty.
constexpr int64_t kEntryBytes = 256;
constexpr int64_t kTileBytes = 48;

absl::Status Conflict(const Contribution& contribution, absl::string_view got, absl::string_view expected) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
               absl::StrCat("call ", contribution.call_id, " was sent again with ", got, " where it had ", expected,
                            "; a call id stands for one backward invocation"),
               {{"call_id", absl::StrCat(contribution.call_id)},
                {"row_offset", absl::StrCat(contribution.row_begin)},
                {"got", std::string(got)},
                {"expected", std::string(expected)}});
}

}  // namespace

absl::StatusOr<LedgerVerdict> Ledger::Check(const Contribution& contribution) const {
  const auto call = calls_.find({contribution.session_id, contribution.call_id});
  const int64_t row_end = contribution.row_begin + contribution.row_count;
  int64_t marked = 0;
  if (call != calls_.end()) {
    const CallEntry& entry = call->second;
    if (entry.layer != contribution.layer) {
      return Conflict(contribution, absl::StrCat("layer ", contribution.layer), absl::StrCat("layer ", entry.layer));
    }
    if (entry.row_count != contribution.call_row_count) {
      return Conflict(contribution, absl::StrCat(contribution.call_row_count, " rows"),
                      absl::StrCat(entry.row_count, " rows"));
    }
    marked = entry.tiles.back().row_end;
    if (contribution.row_begin < marked) {
      const auto tile = std::lower_bound(entry.tiles.begin(), entry.tiles.end(), row_end,
                                         [](const Tile& tile, int64_t end) { return tile.row_end < end; });
      if (tile == entry.tiles.end() || tile->row_end != row_end || tile->dy_hash != contribution.dy_hash) {
        return Conflict(contribution, absl::StrCat("another dy in rows ", contribution.row_begin, " to ", row_end - 1),
                        "the dy that was counted");
      }
      return LedgerVerdict::kRepeat;
    }
  }
  if (contribution.row_begin != marked) {
    return Error(absl::StatusCode::kInternal, Reason::kInternal,
                 absl::StrCat("call ", contribution.call_id, " adds row ", contribution.row_begin, " after row ",
                              marked - 1, "; tiles of a call are added in order"));
  }
  if (bytes_ + 2 * kEntryBytes + kTileBytes > kMaxBytes) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                 absl::StrCat("the step's ", calls_.size(), " calls take ", bytes_, " bytes to remember, of ",
                              kMaxBytes, "; commit or discard it, or send more rows a call"));
  }
  return LedgerVerdict::kAdd;
}

void Ledger::Mark(const Contribution& contribution) {
  CallEntry& entry = calls_[{contribution.session_id, contribution.call_id}];
  entry.layer = contribution.layer;
  entry.row_count = contribution.call_row_count;
  if (entry.tiles.empty()) bytes_ += kEntryBytes;
  entry.tiles.push_back({contribution.row_begin + contribution.row_count, contribution.dy_hash});
  bytes_ += kTileBytes;
  int64_t& rows = rows_[contribution.session_id][contribution.layer];
  if (rows == 0) bytes_ += kEntryBytes;
  rows += contribution.row_count;
}

LayerRows Ledger::RowsOf(int64_t session_id) const {
  const auto rows = rows_.find(session_id);
  return rows == rows_.end() ? LayerRows() : rows->second;
}

void Ledger::Clear() {
  calls_.clear();
  rows_.clear();
  bytes_ = 0;
}

}  // namespace shardmlp
