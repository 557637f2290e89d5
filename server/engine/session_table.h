// Who is connected, and until when.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/step_types.h"

namespace shardmlp {

// Thread-compatible; the engine's lock guards it. Time is the caller's.
class SessionTable {
 public:
  struct Limits {
    int64_t max_sessions = 256;
    absl::Duration lease = absl::Seconds(30);
    bool frozen = false;        // any number of runs, since none changes anything
    int64_t max_readers = 128;  // read sessions among max_sessions
  };
  explicit SessionTable(const Limits& limits) : limits_(limits) {}

  // The session of that opening id where there is one. INVALID_ARGUMENT; FAILED_PRECONDITION (RUN_CONFLICT), saying who
  // is there and until when; RESOURCE_EXHAUSTED (TOO_MANY_SESSIONS).
  absl::StatusOr<int64_t> Open(const SessionSpec& spec, absl::Time now);
  // NOT_FOUND (UNKNOWN_SESSION). Finding a session extends its lease.
  absl::StatusOr<SessionSpec> Find(int64_t session_id, absl::Time now);
  // False where there is none.
  bool Close(int64_t session_id);

  // A session with an open call does not expire.
  void CallOpened(int64_t session_id);
  void CallClosed(int64_t session_id, absl::Time now);

  // Removes the sessions whose lease has ended, and returns them.
  std::vector<int64_t> Expire(absl::Time now);

  int64_t Count(SessionRole role) const;

 private:
  struct Session {
    SessionSpec spec;
    absl::Time lease_end;
    int64_t open_calls = 0;
  };

  int64_t FindOpening(const SessionSpec& spec) const;
  absl::Status CheckRun(const SessionSpec& spec, absl::Time now) const;

  const Limits limits_;
  absl::BitGen random_;
  absl::flat_hash_map<int64_t, Session> sessions_;
};

}  // namespace shardmlp
