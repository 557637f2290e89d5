#include "server/log.h"

#include <grpc/support/log.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <nlohmann/json.hpp>

namespace shardmlp {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

// "%J" in a pattern: the message as a JSON string, whatever bytes it holds.
class JsonMessage final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm& /*time*/, spdlog::memory_buf_t& to) override {
    const std::string text(message.payload.begin(), message.payload.end());
    const std::string json = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    to.append(json.data(), json.data() + json.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<JsonMessage>(); }
};

void LogGrpc(gpr_log_func_args* message) {
  spdlog::log(message->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::debug, "gRPC: {}",
              message->message);
}

}  // namespace

void StartLog(const LogOptions& options) {
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  formatter->add_flag<JsonMessage>('J');
  formatter->set_pattern(options.format == LogFormat::kJson
                             ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l","message":%J})"
                             : "%Y-%m-%dT%H:%M:%S.%eZ %l %v");
  auto logger = std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->set_level(ToSpdlog(options.level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(&LogGrpc);
}

void LogInfo(absl::string_view message) { spdlog::info("{}", std::string_view(message.data(), message.size())); }
void LogWarning(absl::string_view message) { spdlog::warn("{}", std::string_view(message.data(), message.size())); }
void LogError(absl::string_view message) { spdlog::error("{}", std::string_view(message.data(), message.size())); }

}  // namespace shardmlp
