// The server's log: one line an event on stderr, as text or JSON. A leaf: knows no other room.
//
// An event is a constant text, such as "step committed"; whatever differs from one to the next is a field: ids of
// sessions and calls, numbers, names. Lines are written by a thread of their own, so that a reader of stderr that
// stands still holds up nobody; the oldest of those that wait are then dropped. Of one event, or of one kind of it, a
// few lines a second are written, and the next says how many were not ("suppressed"). Nothing is written before
// StartLog.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"

namespace shardmlp {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

struct LogField {
  const char* name;
  std::variant<int64_t, double, std::string> value;
};
using LogFields = std::vector<LogField>;

// Once, ahead of any logging. StopLog writes what waits; nothing is written after it.
void StartLog(const LogOptions& options);
void StopLog();

// Thread-safe. Whether lines of a level are written, for those whose fields cost something.
bool Logs(LogLevel level);
// `kind`: a constant too, of few. Those of an event do not take each other's lines.
void Log(LogLevel level, const char* event, const LogFields& fields = {}, absl::string_view kind = {});
inline void LogInfo(const char* event, const LogFields& fields = {}) { Log(LogLevel::kInfo, event, fields); }
inline void LogWarning(const char* event, const LogFields& fields = {}) { Log(LogLevel::kWarning, event, fields); }
inline void LogError(const char* event, const LogFields& fields = {}) { Log(LogLevel::kError, event, fields); }

// What follows time and level on a line: as text `step committed step=3 reason="it was so"`, as JSON the object's
// members `"message":"step committed","step":3`. Always on one line, whatever bytes a value holds.
std::string LogLine(LogFormat format, const char* event, const LogFields& fields);

}  // namespace shardmlp
