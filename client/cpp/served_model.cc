#include "client/cpp/served_model.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardmlp {

int64_t ClientTensor::byte_count() const {
  int64_t count = SizeOf(dtype);
  for (const int64_t size : shape) count *= size;
  return count;
}

const ClientLayer* ServedModel::FindLayer(int layer) const {
  for (const ClientLayer& candidate : layers) {
    if (candidate.layer == layer) return &candidate;
  }
  return nullptr;
}

const ClientTensor* ServedModel::FindTensor(const std::string& name) const {
  for (const ClientTensor& candidate : tensors) {
    if (candidate.name == name) return &candidate;
  }
  return nullptr;
}

std::string ServedModel::MissingTrainers() const {
  std::map<int, bool> sealed;
  for (const ClientTrainer& trainer : trainers) sealed[trainer.trainer_rank] = trainer.sealed;
  const int count = trainers.empty() ? 0 : trainers.front().trainer_count;
  std::vector<std::string> missing;
  for (int rank = 0; rank < count; ++rank) {
    if (!sealed.contains(rank)) {
      missing.push_back(absl::StrCat("rank ", rank, " (not connected)"));
    } else if (!sealed[rank]) {
      missing.push_back(absl::StrCat("rank ", rank));
    }
  }
  return absl::StrJoin(missing, ", ");
}

}  // namespace shardmlp
