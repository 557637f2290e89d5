// What a server's series did between two looks at them, by the formulas of Prometheus: what `deploy/grafana` asks.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "client/cpp/served_metrics.h"

namespace shardmlp {

using Labels = std::map<std::string, std::string>;

// Each answer is of the series of a name that have all of `labels`, added up: PromQL's sum(). NaN where there is
// nothing to divide by. Immutable.
class Window {
 public:
  // `seconds` lie between the looks, more than 0. Series that the first does not have are left out of rates.
  Window(const std::vector<ClientSeries>& before, std::vector<ClientSeries> now, double seconds);

  double seconds() const { return seconds_; }

  // Of gauges, now.
  double Value(const std::string& name, const Labels& labels = {}) const;
  std::map<std::string, double> ValuesBy(const std::string& label, const std::string& name) const;

  // rate() of counters: how much they grew a second. One that fell began anew at 0, with its server.
  double Rate(const std::string& name, const Labels& labels = {}) const;
  std::map<std::string, double> RatesBy(const std::string& label, const std::string& name) const;
  // rate() of a histogram's _count and _sum.
  double CountRate(const std::string& name, const Labels& labels = {}) const;
  double SumRate(const std::string& name, const Labels& labels = {}) const;
  // histogram_quantile(q, sum by (le) (rate(_bucket))): between a bucket's bounds as if its values were spread evenly;
  // the last bound for what lies above it.
  double Quantile(double q, const std::string& name, const Labels& labels = {}) const;

 private:
  // A series at both looks.
  struct Change {
    ClientSeries before;
    ClientSeries now;
  };

  const double seconds_;
  std::vector<ClientSeries> now_;
  std::vector<Change> changes_;
};

}  // namespace shardmlp
