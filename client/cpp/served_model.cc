#include "client/cpp/served_model.h"

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

}  // namespace shardmlp
