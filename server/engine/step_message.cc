#include "server/engine/step_message.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using nlohmann::json;

// JSON has no infinity and no NaN.
json FromDoubles(const std::vector<double>& values) {
  json array = json::array();
  for (const double value : values) array.push_back(std::isfinite(value) ? json(value) : json(absl::StrCat(value)));
  return array;
}

std::vector<double> ToDoubles(const json& array) {
  std::vector<double> values;
  for (const json& value : array) {
    double number = NAN;
    if (value.is_string() && absl::SimpleAtod(value.get<std::string>(), &number)) {
      values.push_back(number);
    } else {
      values.push_back(value.get<double>());
    }
  }
  return values;
}

}  // namespace

// As nlohmann::json finds them.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AdamW, learning_rate, beta1, beta2, epsilon, weight_decay)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Sgd, learning_rate, momentum, dampening, weight_decay, nesterov)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepPosition, step, attempt, weights_version)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UpdateHistory, count, optimizer)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainerReport, step, attempt, run_id, trainer_count, sealed, opened, in_progress,
                                   rows, non_finite_origin, committed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AttemptEnd, step, attempt, outcome, reason)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckpointEdition, name, edition)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RestoreOrder, checkpoint, weights_version)

static void to_json(json& to, const ParameterGroup& group) {
  to = {{"tensors", group.tensors}, {"optimizer", Name(group.hyperparameters)}};
  if (const auto* adamw = std::get_if<AdamW>(&group.hyperparameters)) to["hyperparameters"] = *adamw;
  if (const auto* sgd = std::get_if<Sgd>(&group.hyperparameters)) to["hyperparameters"] = *sgd;
}

static void from_json(const json& from, ParameterGroup& group) {
  from.at("tensors").get_to(group.tensors);
  const std::string optimizer = from.at("optimizer");
  group.hyperparameters = KeepFrozen{};
  if (optimizer == Name(AdamW{})) group.hyperparameters = from.at("hyperparameters").get<AdamW>();
  if (optimizer == Name(Sgd{})) group.hyperparameters = from.at("hyperparameters").get<Sgd>();
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CommitSpec, session_id, step, attempt, groups, gradient_scale, fresh_optimizer)

static void to_json(json& to, const SumReport& report) {
  to = {{"step", report.step}, {"attempt", report.attempt}, {"squares", FromDoubles(report.tensor_sums_of_squares)}};
}

static void from_json(const json& from, SumReport& report) {
  from.at("step").get_to(report.step);
  from.at("attempt").get_to(report.attempt);
  report.tensor_sums_of_squares = ToDoubles(from.at("squares"));
}

static void to_json(json& to, const Arrival&) { to = json::object(); }
static void from_json(const json&, Arrival&) {}

static void to_json(json& to, const SealResult& seal) {
  to = {{"squares", FromDoubles(seal.tensor_sums_of_squares)},
        {"finite", seal.finite},
        {"non_finite_origin", seal.non_finite_origin},
        {"rows", seal.rows}};
}

static void from_json(const json& from, SealResult& seal) {
  seal.tensor_sums_of_squares = ToDoubles(from.at("squares"));
  from.at("finite").get_to(seal.finite);
  from.at("non_finite_origin").get_to(seal.non_finite_origin);
  from.at("rows").get_to(seal.rows);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CommittedStep, decision, sealed, position)

static void to_json(json& to, const StateHeader& header) {
  to = {{"failure", header.failure}, {"position", header.position}, {"updates", header.updates}};
  if (header.committed.has_value()) to["committed"] = *header.committed;
}

static void from_json(const json& from, StateHeader& header) {
  from.at("failure").get_to(header.failure);
  from.at("position").get_to(header.position);
  from.at("updates").get_to(header.updates);
  if (from.contains("committed")) header.committed = from.at("committed").get<CommittedStep>();
}

namespace {

// nlohmann's conversions throw; nothing goes further than this.
template <typename T, typename Convert>
absl::StatusOr<T> Parse(absl::string_view text, Convert convert) {
  try {
    return convert(json::parse(text));
  } catch (const json::exception& error) {
    return Error(absl::StatusCode::kInternal, Reason::kInternal,
                 absl::StrCat("a replica sent what is no message of this version: ", error.what()));
  }
}

// The alternative number `kind` of StepMessage.
template <size_t kFirst = 0>
StepMessage Alternative(size_t kind, const json& body) {
  if constexpr (kFirst + 1 < std::variant_size_v<StepMessage>) {
    if (kind != kFirst) return Alternative<kFirst + 1>(kind, body);
  }
  return body.get<std::variant_alternative_t<kFirst, StepMessage>>();
}

}  // namespace

std::string Serialize(const StepMessage& message) {
  const json body = std::visit([](const auto& alternative) { return json(alternative); }, message);
  return json{{"kind", message.index()}, {"body", body}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<StepMessage> ParseStepMessage(absl::string_view text) {
  return Parse<StepMessage>(text, [](const json& from) -> absl::StatusOr<StepMessage> {
    const size_t kind = from.at("kind");
    if (kind < std::variant_size_v<StepMessage>) return Alternative(kind, from.at("body"));
    return Error(absl::StatusCode::kInternal, Reason::kInternal,
                 absl::StrCat("a replica sent a message of kind ", kind));
  });
}

std::string Serialize(const StateHeader& header) {
  return json(header).dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<StateHeader> ParseStateHeader(absl::string_view text) {
  return Parse<StateHeader>(text, [](const json& from) { return from.get<StateHeader>(); });
}

}  // namespace shardmlp
