#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/bench/bench_json.h"
#include "client/cli/plan/measured_plan.h"

namespace shardmlp {
namespace {

void PrintVariants(absl::string_view name, const std::vector<Variant>& variants, std::string (*describe)(int64_t value),
                   std::ostream& out) {
  if (variants.empty()) return;
  out << absl::StreamFormat("%-12s", name);
  for (const Variant& variant : variants) {
    out << absl::StreamFormat("%s: %.1f; ", describe(variant.value), variant.tokens_per_second);
  }
  out << "best: " << describe(BestOf(variants).value) << "\n";
}

std::string DescribeShard(int64_t bytes) {
  return bytes == 0 ? std::string("the server's own choice") : absl::StrCat(bytes / 1024, " KiB");
}
std::string DescribeNumber(int64_t number) { return absl::StrCat(number); }

nlohmann::ordered_json VariantsAsJson(const std::vector<Variant>& variants) {
  nlohmann::ordered_json json = {{"tried", nlohmann::json::array()}};
  for (const Variant& variant : variants) {
    json["tried"].push_back({{"value", variant.value}, {"tokens_per_second", variant.tokens_per_second}});
  }
  if (!variants.empty()) json["best"] = BestOf(variants).value;
  return json;
}

}  // namespace

void PrintMeasuredPlan(const MeasuredPlan& plan, std::ostream& out) {
  out << absl::StreamFormat(
      "measured     round trip %.3f ms, link %.2f Gbit/s, arithmetic %.1f GFLOP/s forward and %.1f backward\n",
      absl::ToDoubleMilliseconds(plan.link.round_trip), plan.link.bytes_per_second * 8 / 1e9,
      plan.rates.server_forward / 1e9, plan.rates.server_backward / 1e9);
  out << absl::StreamFormat("predicted    %.1f tokens a second of a layer, bounded by %s\n",
                            plan.predicted.tokens_per_second, Name(plan.predicted.bound));
  out << absl::StreamFormat("loaded       %.1f: %.2f of it\n\n", plan.load.TokensPerSecond(), plan.ratio());
  PrintBench(plan.load, out);
  out << "\ntokens a second by\n";
  PrintVariants("shards", plan.shards, DescribeShard, out);
  PrintVariants("connections", plan.connections, DescribeNumber, out);
}

void PrintMeasuredPlanAsJson(const MeasuredPlan& plan, std::ostream& out) {
  nlohmann::ordered_json json = {{"measured",
                                  {{"round_trip_seconds", absl::ToDoubleSeconds(plan.link.round_trip)},
                                   {"link_bytes_per_second", plan.link.bytes_per_second},
                                   {"forward_flops_per_second", plan.rates.server_forward},
                                   {"backward_flops_per_second", plan.rates.server_backward}}},
                                 {"predicted_tokens_per_second", plan.predicted.tokens_per_second},
                                 {"bound", Name(plan.predicted.bound)},
                                 {"loaded_tokens_per_second", plan.load.TokensPerSecond()},
                                 {"ratio", plan.ratio()},
                                 {"shard_bytes", VariantsAsJson(plan.shards)},
                                 {"connections", VariantsAsJson(plan.connections)},
                                 {"load", BenchAsJson(plan.load)}};
  out << json.dump(2) << "\n";
}

}  // namespace shardmlp
