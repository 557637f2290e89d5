#include "server/grpc_log.h"

#include <grpc/support/log.h>

#include "server/log.h"

namespace shardmlp {

void LogGrpc() {
  gpr_set_log_function([](gpr_log_func_args* message) {
    const bool error = message->severity == GPR_LOG_SEVERITY_ERROR;
    Log(error ? LogLevel::kWarning : LogLevel::kDebug, "gRPC", {{"said", std::string(message->message)}});
  });
}

}  // namespace shardmlp
