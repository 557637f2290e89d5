// The process's own CPU time, memory and files, under the names that every Prometheus client library gives them.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <vector>

namespace shardmlp {

// Thread-safe: reads /proc at each scrape and keeps nothing.
class ProcessMetrics final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace shardmlp
