#include "server/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "server/metrics_table.h"

namespace shardmlp {
namespace {

prometheus::MetricFamily Family(SeriesId id, double value) {
  const SeriesSpec& spec = SpecOf(id);
  const bool counts = spec.type == SeriesType::kCounter;
  prometheus::ClientMetric metric;
  (counts ? metric.counter.value : metric.gauge.value) = value;
  return {spec.name, spec.meaning, counts ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge, {metric}};
}

}  // namespace

std::vector<prometheus::MetricFamily> ProcessMetrics::Collect() const {
  int64_t virtual_pages = 0;
  int64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> virtual_pages >> resident_pages;
  const auto page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const double cpu_seconds = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                             static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  std::error_code error;
  const auto files = std::filesystem::directory_iterator("/proc/self/fd", error);
  const auto file_count = static_cast<double>(std::distance(begin(files), end(files)));

  return {Family(SeriesId::kProcessCpuSeconds, cpu_seconds),
          Family(SeriesId::kProcessResidentBytes, static_cast<double>(resident_pages) * page_bytes),
          Family(SeriesId::kProcessVirtualBytes, static_cast<double>(virtual_pages) * page_bytes),
          Family(SeriesId::kProcessOpenFiles, file_count)};
}

}  // namespace shardmlp
