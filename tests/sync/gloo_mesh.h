// Groups over loopback whose ranks are threads of one process.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "server/sync/gloo_group.h"

namespace shardmlp::testing {

// Runs `run(rank)` for all ranks at once.
inline void OnRanks(int size, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&run, rank] { run(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Where `rank` finds each of the others.
inline std::vector<std::string> PeersOf(int rank, const std::vector<std::shared_ptr<GlooGroup>>& groups) {
  std::vector<std::string> peers;
  for (const auto& group : groups) peers.push_back(group->addresses()[rank]);
  return peers;
}

inline std::vector<std::shared_ptr<GlooGroup>> ListeningMesh(const GlooDevice& device, int size,
                                                             const GlooOptions& options) {
  std::vector<std::shared_ptr<GlooGroup>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(GlooGroup::Listen(device, rank, size, options).value());
  }
  return groups;
}

inline std::vector<std::shared_ptr<GlooGroup>> ConnectedMesh(int size, const GlooOptions& options = {}) {
  const GlooDevice device = OpenGlooDevice("127.0.0.1").value();
  const auto groups = ListeningMesh(device, size, options);
  OnRanks(size, [&](int rank) { groups[rank]->Connect(PeersOf(rank, groups)).IgnoreError(); });
  return groups;
}

}  // namespace shardmlp::testing
