// Errors: absl::Status everywhere, with a reason from a fixed list and the facts of the case attached.
//
// A message says what was got and what was expected. The reason is for programs (clients, metrics), the metadata for
// people and logs; rpc turns both into google.rpc.ErrorInfo, and nothing below rpc knows about that.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmlp {

// Why something failed. docs/protocol.md explains each; metrics use the names as label values.
enum class Reason {
  kUnspecified,
  kInvalidArgument,      // a field is out of range
  kInvalidShape,         // a size does not fit the layer
  kInvalidDType,         // an element type that is unknown or not served
  kInvalidRows,          // rows that overlap, are missing, or too many
  kInvalidMessageOrder,  // header missing or twice, anything after the end
  kMalformedMessage,     // bytes that are no message
  kMessageTooLarge,      // above the advertised limit
  kUnknownLayer,
  kUnknownTensor,
  kUnknownSession,  // never opened, closed, or its lease ended
  kRunConflict,     // another run trains here, or the run disagrees with itself
  kStaleWeights,    // another weights version
  kStaleAttempt,    // another step or an attempt that is over
  kStepAborted,     // the attempt ended under this session
  kStashFull,       // no room for what a forward is to pin
  kTicketMissing,   // the stash does not have what a backward names: send x
  kAlreadySealed,
  kNotSealed,
  kTrainerMissing,        // a trainer did not seal in time
  kRowCountMismatch,      // rows said and rows counted differ
  kContributionConflict,  // one call id with two different dy
  kDecisionConflict,      // the attempt was decided otherwise
  kOptimizerMismatch,     // the optimizer state is another optimizer's
  kNonFinite,
  kFrozen,  // weight gradients asked of a frozen server or read session
  kOverloaded,
  kTooManySessions,
  kReplicaMissing,  // the replicas of the server are not all there
  kReplicaDrift,    // replicas that should be equal are not
  kLoading,         // the server has not loaded its model yet
  kDraining,
  kWeightsChanged,  // a commit fell into the middle of a call
  kStalled,         // a client that neither sends nor reads
  kCancelled,
  kUnknownCheckpoint,
  kCheckpointCorrupt,
  kCheckpointMismatch,  // of another model
  kCheckpointDisabled,
  kStorageFull,    // no room for a checkpoint
  kStorageFailed,  // a file can't be read, written or examined
  kUnsupportedModel,
  kModelCorrupt,
  kOutOfMemory,  // the memory plan does not fit
  kDeviceFailed,
  kReplicaLost,       // another replica went away, or can't be reached
  kReplicaConflict,   // a replica that differs from rank 0, or whose rank is taken
  kInternal,          // the server's own fault
  kUnreachable,       // client: no server within the retry budget
  kUnauthenticated,   // a call without a token, or with one that the server doesn't have
  kPermissionDenied,  // a call that the server takes from known clients alone
};

// UPPER_SNAKE_CASE, without the k: "UNKNOWN_SESSION".
absl::string_view Name(Reason reason);
// All of them, in order.
absl::Span<const absl::string_view> ReasonNames();
// kUnspecified for a name that is none.
Reason ReasonFromName(absl::string_view name);

using ErrorMetadata = std::vector<std::pair<std::string, std::string>>;

// A status that carries `reason` and `metadata`. `code` must not be kOk.
absl::Status Error(absl::StatusCode code, Reason reason, absl::string_view message, const ErrorMetadata& metadata = {});

// kUnspecified where none is attached.
Reason ReasonOf(const absl::Status& status);
ErrorMetadata MetadataOf(const absl::Status& status);

// The same status with `prefix` put before its message; reason and metadata stay.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

}  // namespace shardmlp

#define SHARDMLP_CONCAT_INNER(a, b) a##b
#define SHARDMLP_CONCAT(a, b) SHARDMLP_CONCAT_INNER(a, b)

#define SHARDMLP_RETURN_IF_ERROR(expression)                                  \
  do {                                                                        \
    if (absl::Status shardmlp_status = (expression); !shardmlp_status.ok()) { \
      return shardmlp_status;                                                 \
    }                                                                         \
  } while (false)

#define SHARDMLP_ASSIGN_OR_RETURN(lhs, expression) \
  SHARDMLP_ASSIGN_OR_RETURN_INNER(SHARDMLP_CONCAT(shardmlp_or_, __LINE__), lhs, expression)
#define SHARDMLP_ASSIGN_OR_RETURN_INNER(statusor, lhs, expression) \
  auto statusor = (expression);                                    \
  if (!statusor.ok()) return std::move(statusor).status();         \
  lhs = *std::move(statusor)
