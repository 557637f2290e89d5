// What shardmlpctl does, apart from its command line.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmlp {

// Writes what the server serves: layers, limits, memory plan, trainers and the open step; as a table or as JSON.
void PrintInfo(const ServedModel& model, std::ostream& out);
void PrintInfoAsJson(const ServedModel& model, std::ostream& out);

// Layers by "0-3,7", each served and ascending; all of them for "". INVALID_ARGUMENT or NOT_FOUND.
absl::StatusOr<std::vector<ClientLayer>> SelectLayers(const ServedModel& model, const std::string& layers);

// Computes `rows` tokens of each layer here, in f64, and on the server, in a read session, and writes the largest
// differences of y and dx over the largest reference. True where all are within kernels/error_bounds.h.
absl::StatusOr<bool> Verify(Client& client, const std::vector<ClientLayer>& layers, int64_t rows, std::ostream& out);

struct TopOptions {
  absl::Duration interval = absl::Seconds(2);
  int64_t count = 0;  // of reports; 0: until SIGINT or SIGTERM
  bool json = false;
};

// Shows again and again what a server does: on the terminal at standard output, or as lines to `out` where that is
// none. Goes on where the server goes away, and says so. Fails where it is not there at first, or was not at the last.
absl::Status Top(const std::string& target, ClientOptions options, const TopOptions& top, std::ostream& out);

// Has the server drain, and waits until it is gone, with a line on `progress` whenever something has changed; then
// writes what it left, as text or as JSON. False where that is not all: calls were cut off, or a sealed step was left
// to its trainers. DEADLINE_EXCEEDED where it is not gone within `timeout`; it goes on draining.
absl::StatusOr<bool> Drain(Client& client, absl::Duration timeout, bool json, std::ostream& progress,
                           std::ostream& out);

// `action`: "save", "restore" or "delete", of the checkpoint `name`, or "list".
absl::Status RunCheckpoint(Client& client, const std::string& action, const std::string& name, std::ostream& out);

}  // namespace shardmlp
