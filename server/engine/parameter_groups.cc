#include "server/engine/parameter_groups.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status Invalid(Reason reason, const std::string& message) {
  return Error(absl::StatusCode::kInvalidArgument, reason, message);
}

}  // namespace

absl::StatusOr<std::vector<Hyperparameters>> ResolveGroups(const std::vector<ParameterGroup>& groups,
                                                           const ModelSpec& model) {
  absl::flat_hash_map<std::string, const Hyperparameters*> found;
  for (const TensorSpec& tensor : model.tensors) found[tensor.name] = nullptr;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (const absl::Status status = Validate(groups[i].hyperparameters); !status.ok()) {
      return Invalid(Reason::kInvalidArgument, absl::StrCat("parameter group ", i, ": ", status.message()));
    }
    for (const std::string& name : groups[i].tensors) {
      const auto tensor = found.find(name);
      if (tensor == found.end()) {
        return Invalid(Reason::kUnknownTensor,
                       absl::StrCat("parameter group ", i, " names '", name, "', which this server does not have"));
      }
      if (tensor->second != nullptr) {
        return Invalid(Reason::kInvalidArgument, absl::StrCat("'", name, "' is in two parameter groups; expected one"));
      }
      tensor->second = &groups[i].hyperparameters;
    }
  }
  std::vector<Hyperparameters> resolved;
  for (const TensorSpec& tensor : model.tensors) {
    if (found[tensor.name] == nullptr) {
      return Invalid(Reason::kInvalidArgument,
                     absl::StrCat("'", tensor.name, "' is in no parameter group; expected every tensor in one (",
                                  model.tensors.size(), " tensors)"));
    }
    resolved.push_back(*found[tensor.name]);
  }
  return resolved;
}

}  // namespace shardmlp
