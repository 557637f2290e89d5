#include "kernels/optimizer.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status OutOfRange(absl::string_view optimizer, absl::string_view name, double value, absl::string_view expected) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrCat(optimizer, "'s ", name, " is ", value, ", expected ", expected),
               {{"hyperparameter", std::string(name)}});
}

absl::Status CheckNonNegative(absl::string_view optimizer, absl::string_view name, double value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return OutOfRange(optimizer, name, value, "a finite number of at least 0");
}

absl::Status CheckDecayRate(absl::string_view name, double value) {
  if (value >= 0 && value < 1) return absl::OkStatus();
  return OutOfRange("AdamW", name, value, "at least 0 and below 1");
}

absl::Status Check(const AdamW& adamw) {
  SHARDMLP_RETURN_IF_ERROR(CheckNonNegative("AdamW", "learning_rate", adamw.learning_rate));
  SHARDMLP_RETURN_IF_ERROR(CheckDecayRate("beta1", adamw.beta1));
  SHARDMLP_RETURN_IF_ERROR(CheckDecayRate("beta2", adamw.beta2));
  SHARDMLP_RETURN_IF_ERROR(CheckNonNegative("AdamW", "epsilon", adamw.epsilon));
  return CheckNonNegative("AdamW", "weight_decay", adamw.weight_decay);
}

absl::Status Check(const Sgd& sgd) {
  SHARDMLP_RETURN_IF_ERROR(CheckNonNegative("SGD", "learning_rate", sgd.learning_rate));
  SHARDMLP_RETURN_IF_ERROR(CheckNonNegative("SGD", "momentum", sgd.momentum));
  if (!std::isfinite(sgd.dampening)) return OutOfRange("SGD", "dampening", sgd.dampening, "a finite number");
  SHARDMLP_RETURN_IF_ERROR(CheckNonNegative("SGD", "weight_decay", sgd.weight_decay));
  if (sgd.nesterov && sgd.momentum == 0) {
    return OutOfRange("SGD", "momentum", 0, "above 0 with nesterov");
  }
  if (sgd.nesterov && sgd.dampening != 0) {
    return OutOfRange("SGD", "dampening", sgd.dampening, "0 with nesterov");
  }
  return absl::OkStatus();
}

absl::Status Check(const KeepFrozen&) { return absl::OkStatus(); }

}  // namespace

absl::Status Validate(const Hyperparameters& hyperparameters) {
  return std::visit([](const auto& optimizer) { return Check(optimizer); }, hyperparameters);
}

absl::string_view Name(const Hyperparameters& hyperparameters) {
  if (std::holds_alternative<AdamW>(hyperparameters)) return "adamw";
  return std::holds_alternative<Sgd>(hyperparameters) ? "sgd" : "";
}

std::string Describe(const Hyperparameters& hyperparameters) {
  if (const auto* adamw = std::get_if<AdamW>(&hyperparameters)) {
    return absl::StrCat("adamw(learning_rate ", adamw->learning_rate, ", beta1 ", adamw->beta1, ", beta2 ",
                        adamw->beta2, ", epsilon ", adamw->epsilon, ", weight_decay ", adamw->weight_decay, ")");
  }
  if (const auto* sgd = std::get_if<Sgd>(&hyperparameters)) {
    return absl::StrCat("sgd(learning_rate ", sgd->learning_rate, ", momentum ", sgd->momentum, ", dampening ",
                        sgd->dampening, ", weight_decay ", sgd->weight_decay, ", nesterov ", sgd->nesterov, ")");
  }
  return "frozen";
}

}  // namespace shardmlp
