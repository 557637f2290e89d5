// The server's log: one line an event on stderr, as text or JSON. gRPC's own messages go there too.
#pragma once

#include "absl/strings/string_view.h"

namespace shardmlp {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

// Once, ahead of any logging.
void StartLog(const LogOptions& options);

// Thread-safe.
void LogInfo(absl::string_view message);
void LogWarning(absl::string_view message);
void LogError(absl::string_view message);

}  // namespace shardmlp
