#include "client/cli/units.h"

#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmlp {
namespace {

std::string Digits(double value) {
  const double size = std::abs(value);
  return absl::StrFormat("%.*f", size < 9.995 ? 2 : size < 99.95 ? 1 : 0, value);
}

// The largest of `units`, each `factor` of the one before, of which there is one at least.
std::string InUnits(double value, double factor, absl::Span<const char* const> units) {
  if (std::isnan(value)) return "-";
  size_t unit = 0;
  for (; unit + 1 < units.size() && std::abs(value) >= factor * 0.9995; ++unit) value /= factor;
  const bool exact = unit == 0 && value == std::round(value);
  return absl::StrCat(exact ? absl::StrFormat("%.0f", value) : Digits(value), units[unit]);
}

}  // namespace

std::string Bytes(double bytes) { return InUnits(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB"}); }
std::string Count(double count) { return InUnits(count, 1000, {"", "k", "M", "G", "T", "P"}); }
std::string Flops(double flops) {
  return InUnits(flops, 1000, {" FLOP/s", " kFLOP/s", " MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s"});
}
std::string Seconds(double seconds) {
  return seconds >= 1 ? absl::StrCat(Digits(seconds), " s") : InUnits(seconds * 1e6, 1000, {" us", " ms", " s"});
}
std::string Percent(double ratio) { return std::isnan(ratio) ? "-" : absl::StrCat(Digits(ratio * 100), " %"); }

}  // namespace shardmlp
