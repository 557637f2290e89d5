// gRPC's own messages in the server's log: its errors as warnings, all else at debug.
#pragma once

namespace shardmlp {

// Once, after StartLog.
void LogGrpc();

}  // namespace shardmlp
