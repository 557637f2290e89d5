#include "server/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

namespace shardmlp {
namespace {

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type, double value) {
  prometheus::ClientMetric metric;
  metric.gauge.value = type == prometheus::MetricType::Gauge ? value : 0;
  metric.counter.value = type == prometheus::MetricType::Counter ? value : 0;
  return {name, help, type, {metric}};
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

  using prometheus::MetricType;
  return {Family("process_cpu_seconds_total", "User and system CPU time.", MetricType::Counter, cpu_seconds),
          Family("process_resident_memory_bytes", "Resident memory.", MetricType::Gauge,
                 static_cast<double>(resident_pages) * page_bytes),
          Family("process_virtual_memory_bytes", "Virtual memory.", MetricType::Gauge,
                 static_cast<double>(virtual_pages) * page_bytes),
          Family("process_open_fds", "Open file descriptors.", MetricType::Gauge, file_count)};
}

}  // namespace shardmlp
