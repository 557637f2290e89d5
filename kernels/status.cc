#include "kernels/status.h"

#include <array>

#include "absl/strings/cord.h"
#include "absl/strings/str_split.h"

namespace shardmlp {
namespace {

constexpr absl::string_view kReasonUrl = "shardmlp/reason";
constexpr absl::string_view kMetadataUrl = "shardmlp/metadata";
// Metadata is kept as "key\x1fvalue" records joined by "\x1e": ASCII's own unit and record separators.
constexpr char kUnit = '\x1f';
constexpr char kRecord = '\x1e';

constexpr std::array<absl::string_view, 51> kNames = {
    "UNSPECIFIED",
    "INVALID_ARGUMENT",
    "INVALID_SHAPE",
    "INVALID_DTYPE",
    "INVALID_ROWS",
    "INVALID_MESSAGE_ORDER",
    "MALFORMED_MESSAGE",
    "MESSAGE_TOO_LARGE",
    "UNKNOWN_LAYER",
    "UNKNOWN_TENSOR",
    "UNKNOWN_SESSION",
    "RUN_CONFLICT",
    "STALE_WEIGHTS",
    "STALE_ATTEMPT",
    "STEP_ABORTED",
    "STASH_FULL",
    "TICKET_MISSING",
    "ALREADY_SEALED",
    "NOT_SEALED",
    "TRAINER_MISSING",
    "ROW_COUNT_MISMATCH",
    "CONTRIBUTION_CONFLICT",
    "DECISION_CONFLICT",
    "OPTIMIZER_MISMATCH",
    "NON_FINITE",
    "FROZEN",
    "OVERLOADED",
    "TOO_MANY_SESSIONS",
    "REPLICA_MISSING",
    "REPLICA_DRIFT",
    "LOADING",
    "DRAINING",
    "WEIGHTS_CHANGED",
    "STALLED",
    "CANCELLED",
    "UNKNOWN_CHECKPOINT",
    "CHECKPOINT_CORRUPT",
    "CHECKPOINT_MISMATCH",
    "CHECKPOINT_DISABLED",
    "STORAGE_FULL",
    "STORAGE_FAILED",
    "UNSUPPORTED_MODEL",
    "MODEL_CORRUPT",
    "OUT_OF_MEMORY",
    "DEVICE_FAILED",
    "REPLICA_LOST",
    "REPLICA_CONFLICT",
    "INTERNAL",
    "UNREACHABLE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
};
static_assert(kNames.size() == static_cast<size_t>(Reason::kPermissionDenied) + 1);

}  // namespace

absl::string_view Name(Reason reason) { return kNames[static_cast<size_t>(reason)]; }

absl::Span<const absl::string_view> ReasonNames() { return kNames; }

Reason ReasonFromName(absl::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Reason>(i);
  }
  return Reason::kUnspecified;
}

absl::Status Error(absl::StatusCode code, Reason reason, absl::string_view message, const ErrorMetadata& metadata) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(Name(reason)));
  std::string records;
  for (const auto& [key, value] : metadata) {
    if (!records.empty()) records += kRecord;
    absl::StrAppend(&records, key, absl::string_view(&kUnit, 1), value);
  }
  if (!records.empty()) status.SetPayload(kMetadataUrl, absl::Cord(records));
  return status;
}

Reason ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? ReasonFromName(std::string(*payload)) : Reason::kUnspecified;
}

ErrorMetadata MetadataOf(const absl::Status& status) {
  ErrorMetadata metadata;
  const auto payload = status.GetPayload(kMetadataUrl);
  if (!payload.has_value()) return metadata;
  const std::string records(*payload);
  for (const absl::string_view record : absl::StrSplit(records, kRecord)) {
    const std::pair<std::string, std::string> entry = absl::StrSplit(record, absl::MaxSplits(kUnit, 1));
    metadata.push_back(entry);
  }
  return metadata;
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

}  // namespace shardmlp
