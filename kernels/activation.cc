#include "kernels/activation.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr std::array<absl::string_view, 8> kNames = {"silu",       "gelu", "gelu_tanh", "gelu_fast",
                                                     "quick_gelu", "relu", "relu2",     "clamped_swiglu"};

// The values of hidden_act and its like in Hugging Face configs.
constexpr std::array<std::pair<absl::string_view, ActivationKind>, 12> kConfigValues = {{
    {"silu", ActivationKind::kSilu},
    {"swish", ActivationKind::kSilu},
    {"gelu", ActivationKind::kGelu},
    {"gelu_python", ActivationKind::kGelu},
    {"gelu_new", ActivationKind::kGeluTanh},
    {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
    {"gelu_python_tanh", ActivationKind::kGeluTanh},
    {"gelu_accurate", ActivationKind::kGeluTanh},
    {"gelu_fast", ActivationKind::kGeluFast},
    {"quick_gelu", ActivationKind::kQuickGelu},
    {"relu", ActivationKind::kRelu},
    {"relu2", ActivationKind::kRelu2},
}};

}  // namespace

absl::string_view Name(ActivationKind kind) { return kNames[static_cast<size_t>(kind)]; }

absl::StatusOr<ActivationKind> ActivationFromConfig(absl::string_view value) {
  std::vector<absl::string_view> served;
  for (const auto& [name, kind] : kConfigValues) {
    if (name == value) return kind;
    served.push_back(name);
  }
  return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel,
               absl::StrCat("activation \"", value, "\" is not served; expected one of ", absl::StrJoin(served, ", ")),
               {{"activation", std::string(value)}});
}

}  // namespace shardmlp
