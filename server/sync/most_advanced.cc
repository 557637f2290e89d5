#include <algorithm>
#include <iterator>
#include <tuple>

#include "server/sync/replicas.h"

namespace shardmlp {

int MostAdvanced(absl::Span<const ReplicaMember> members) {
  const auto ahead = [](const ReplicaMember& a, const ReplicaMember& b) {
    // Weights versions count from a random number where nobody was in a generation.
    const auto key = [](const ReplicaState& state) {
      return std::tuple(std::max(state.generation, state.checkpoint_generation), state.generation > 0,
                        state.generation == 0 ? state.step : 0, state.weights_version);
    };
    return key(a.state) < key(b.state);
  };
  return static_cast<int>(std::distance(members.begin(), std::max_element(members.begin(), members.end(), ahead)));
}

}  // namespace shardmlp
