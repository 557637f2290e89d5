// The commands of shardmlpctl that need no folder of their own.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmlp {

// Writes what the server serves: layers, limits, memory plan, trainers and the open step; as a table or as JSON.
void PrintInfo(const ServedModel& model, std::ostream& out);
void PrintInfoAsJson(const ServedModel& model, std::ostream& out);

// Has the server drain, and waits until it is gone, with a line on `progress` whenever something has changed; then
// writes what it left, as text or as JSON. False where that is not all: calls were cut off, or a sealed step was left
// to its trainers. DEADLINE_EXCEEDED where it is not gone within `timeout`; it goes on draining.
absl::StatusOr<bool> Drain(Client& client, absl::Duration timeout, bool json, std::ostream& progress,
                           std::ostream& out);

// `action`: "save", "restore" or "delete", of the checkpoint `name`, or "list".
absl::Status RunCheckpoint(Client& client, const std::string& action, const std::string& name, std::ostream& out);

}  // namespace shardmlp
