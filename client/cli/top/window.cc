#include "client/cli/top/window.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace shardmlp {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

bool Matches(const ClientSeries& series, const std::string& name, const Labels& labels) {
  return series.name == name && std::includes(series.labels.begin(), series.labels.end(), labels.begin(), labels.end());
}

double Growth(double before, double now) { return now < before ? now : now - before; }

double Count(const ClientSeries& histogram) {
  return histogram.buckets.empty() ? 0 : static_cast<double>(histogram.buckets.back().cumulative_count);
}

std::string LabelOf(const ClientSeries& series, const std::string& label) {
  const auto found = series.labels.find(label);
  return found == series.labels.end() ? "" : found->second;
}

}  // namespace

Window::Window(const std::vector<ClientSeries>& before, std::vector<ClientSeries> now, double seconds)
    : seconds_(seconds), now_(std::move(now)) {
  std::map<std::pair<std::string, Labels>, const ClientSeries*> earlier;
  for (const ClientSeries& series : before) earlier[{series.name, series.labels}] = &series;
  for (const ClientSeries& series : now_) {
    if (const auto found = earlier.find({series.name, series.labels}); found != earlier.end()) {
      changes_.push_back({*found->second, series});
    }
  }
}

double Window::Value(const std::string& name, const Labels& labels) const {
  double sum = 0;
  for (const ClientSeries& series : now_) {
    if (Matches(series, name, labels)) sum += series.value;
  }
  return sum;
}

std::map<std::string, double> Window::ValuesBy(const std::string& label, const std::string& name) const {
  std::map<std::string, double> values;
  for (const ClientSeries& series : now_) {
    if (series.name == name) values[LabelOf(series, label)] += series.value;
  }
  return values;
}

double Window::Rate(const std::string& name, const Labels& labels) const {
  double sum = 0;
  for (const auto& [before, now] : changes_) {
    if (Matches(now, name, labels)) sum += Growth(before.value, now.value);
  }
  return sum / seconds_;
}

std::map<std::string, double> Window::RatesBy(const std::string& label, const std::string& name) const {
  std::map<std::string, double> rates;
  for (const auto& [before, now] : changes_) {
    if (now.name == name) rates[LabelOf(now, label)] += Growth(before.value, now.value) / seconds_;
  }
  return rates;
}

double Window::CountRate(const std::string& name, const Labels& labels) const {
  double sum = 0;
  for (const auto& [before, now] : changes_) {
    if (Matches(now, name, labels)) sum += Growth(Count(before), Count(now));
  }
  return sum / seconds_;
}

double Window::SumRate(const std::string& name, const Labels& labels) const {
  double sum = 0;
  for (const auto& [before, now] : changes_) {
    if (Matches(now, name, labels)) sum += Growth(before.sum, now.sum);
  }
  return sum / seconds_;
}

double Window::Quantile(double q, const std::string& name, const Labels& labels) const {
  std::map<double, double> grown;  // by upper bound, cumulative
  for (const auto& [before, now] : changes_) {
    if (!Matches(now, name, labels)) continue;
    for (size_t i = 0; i < std::min(before.buckets.size(), now.buckets.size()); ++i) {
      grown[now.buckets[i].upper_bound] += Growth(static_cast<double>(before.buckets[i].cumulative_count),
                                                  static_cast<double>(now.buckets[i].cumulative_count));
    }
  }
  if (grown.size() < 2 || grown.rbegin()->first != std::numeric_limits<double>::infinity()) return kNone;
  // A restart between the looks may have left a bucket with less than the one before it.
  for (auto bucket = std::next(grown.begin()); bucket != grown.end(); ++bucket) {
    bucket->second = std::max(bucket->second, std::prev(bucket)->second);
  }
  const double rank = q * grown.rbegin()->second;
  if (!(rank > 0)) return kNone;
  const auto found =
      std::find_if(grown.begin(), grown.end(), [&](const auto& bucket) { return bucket.second >= rank; });
  if (std::next(found) == grown.end()) return std::prev(found)->first;
  const bool first = found == grown.begin();
  const double lower = first ? 0 : std::prev(found)->first;
  const double counted = first ? 0 : std::prev(found)->second;
  return lower + (found->first - lower) * (rank - counted) / (found->second - counted);
}

}  // namespace shardmlp
