// Whether options go together: with each other, and with what clients do by default.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/options.h"

namespace shardmlp {

// What can't be served so, each a sentence that names the flags and their values. All of them, not the first alone.
std::vector<std::string> Contradictions(const ServerOptions& options);

// What is served and is no good idea, or needs clients that are told so: likewise.
std::vector<std::string> Warnings(const ServerOptions& options);

// INVALID_ARGUMENT, naming the layer, where a row of it does not fit into a message.
absl::Status CheckMessages(const ModelSpec& model, const MessageLimits& limits);

// Reads the files that the options name: certificates, keys, tokens and the model, and tries whether the drain's
// checkpoint could be saved. Says what is wrong with each. The options may contradict each other.
std::vector<std::string> CheckFiles(const ServerOptions& options);

}  // namespace shardmlp
