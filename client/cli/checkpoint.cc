#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "kernels/status.h"

namespace shardmlp {

absl::Status RunCheckpoint(Client& client, const std::string& action, const std::string& name, std::ostream& out) {
  if (action == "save") {
    SHARDMLP_ASSIGN_OR_RETURN(const ClientCheckpoint saved, client.SaveCheckpoint(name));
    out << absl::StreamFormat("saved %s: step %d, %d bytes\n", saved.name, saved.step, saved.byte_count);
    return absl::OkStatus();
  }
  if (action == "restore") {
    SHARDMLP_ASSIGN_OR_RETURN(const ClientPosition position, client.RestoreCheckpoint(name));
    out << absl::StreamFormat("restored %s: step %d, attempt %d\n", name, position.step, position.attempt);
    return absl::OkStatus();
  }
  if (action == "delete") {
    SHARDMLP_RETURN_IF_ERROR(client.DeleteCheckpoint(name).status());
    out << "deleted " << name << "\n";
    return absl::OkStatus();
  }
  SHARDMLP_ASSIGN_OR_RETURN(const std::vector<ClientCheckpoint> checkpoints, client.ListCheckpoints());
  for (const ClientCheckpoint& checkpoint : checkpoints) {
    out << absl::StreamFormat("%s  step %d  %d bytes\n", checkpoint.name, checkpoint.step, checkpoint.byte_count);
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
