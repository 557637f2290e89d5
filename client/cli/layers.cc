#include "client/cli/layers.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/status.h"

namespace shardmlp {

absl::StatusOr<std::vector<ClientLayer>> SelectLayers(const ServedModel& model, const std::string& layers) {
  if (layers.empty()) return model.layers;
  std::vector<ClientLayer> selected;
  for (const absl::string_view range : absl::StrSplit(layers, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
        first > last) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrCat("--layers is \"", layers, "\", expected ranges such as 0-3,7"));
    }
    for (int layer = first; layer <= last; ++layer) {
      const ClientLayer* const found = model.FindLayer(layer);
      if (found == nullptr) {
        return Error(absl::StatusCode::kNotFound, Reason::kUnknownLayer,
                     absl::StrCat("layer ", layer, " is not among the ", model.layers.size(), " that the server has"));
      }
      selected.push_back(*found);
    }
  }
  return selected;
}

}  // namespace shardmlp
