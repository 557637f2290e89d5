#include "server/log.h"

#include <spdlog/async.h>
#include <spdlog/async_logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/log_limit.h"

namespace shardmlp {
namespace {

constexpr size_t kWaitingLines = 8192;
constexpr double kLinesASecond = 10;  // of one event
constexpr int kBurst = 50;
constexpr size_t kMaxValueBytes = 1024;
// Written bare as text; a value with any other character is quoted as JSON has it.
constexpr char kBare[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/[]";

struct Writer {
  LogFormat format;
  std::shared_ptr<spdlog::details::thread_pool> thread;
  std::shared_ptr<spdlog::logger> logger;
  LogLimit limit{kLinesASecond, kBurst};
};

// Kept to the end of the process: threads may be logging while it stops.
std::atomic<Writer*> writer = nullptr;

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

// No more than kMaxValueBytes of a text, which may be a client's.
nlohmann::json ToJson(const LogField& field) {
  const auto* const text = std::get_if<std::string>(&field.value);
  if (text != nullptr && text->size() > kMaxValueBytes) return absl::StrCat(text->substr(0, kMaxValueBytes), "...");
  return std::visit([](const auto& value) { return nlohmann::json(value); }, field.value);
}

// In ASCII: what a terminal or a viewer takes for an end of a line, a command or another direction is escaped too.
std::string Dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

std::string TextOf(const LogField& field) {
  const auto* const text = std::get_if<std::string>(&field.value);
  const bool bare = text != nullptr && !text->empty() && text->size() <= kMaxValueBytes &&
                    text->find_first_not_of(kBare) == std::string::npos;
  return bare ? *text : Dump(ToJson(field));
}

}  // namespace

std::string LogLine(LogFormat format, const char* event, const LogFields& fields) {
  const bool json = format == LogFormat::kJson;
  std::string line = json ? absl::StrCat("\"message\":", Dump(event)) : event;
  for (const LogField& field : fields) {
    if (json) {
      absl::StrAppend(&line, ",\"", field.name, "\":", Dump(ToJson(field)));
    } else {
      absl::StrAppend(&line, " ", field.name, "=", TextOf(field));
    }
  }
  return line;
}

void StartLog(const LogOptions& options) {
  auto started = std::make_unique<Writer>();
  started->format = options.format;
  started->thread = std::make_shared<spdlog::details::thread_pool>(kWaitingLines, 1);
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  started->logger = std::make_shared<spdlog::async_logger>("", std::move(sink), started->thread,
                                                           spdlog::async_overflow_policy::overrun_oldest);
  started->logger->set_pattern(options.format == LogFormat::kJson
                                   ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                                   : "%Y-%m-%dT%H:%M:%S.%eZ %l %v",
                               spdlog::pattern_time_type::utc);
  started->logger->set_level(ToSpdlog(options.level));
  writer = started.release();
}

void StopLog() {
  Writer* const started = writer.load();
  if (started == nullptr) return;
  started->logger->set_level(spdlog::level::off);
  started->thread.reset();  // its thread writes what waits, and ends
}

bool Logs(LogLevel level) {
  const Writer* const started = writer.load();
  return started != nullptr && started->logger->should_log(ToSpdlog(level));
}

void Log(LogLevel level, const char* event, const LogFields& fields, absl::string_view kind) {
  if (!Logs(level)) return;
  Writer& started = *writer.load();
  const std::optional<int64_t> suppressed = started.limit.Admit(event, kind, absl::Now());
  if (!suppressed.has_value()) return;
  LogFields all = fields;
  if (*suppressed > 0) all.push_back({"suppressed", *suppressed});
  started.logger->log(ToSpdlog(level), spdlog::string_view_t(LogLine(started.format, event, all)));
}

}  // namespace shardmlp
