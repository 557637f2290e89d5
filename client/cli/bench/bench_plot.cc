#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "client/cli/bench/bench.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using FilePointer = std::unique_ptr<FILE, int (*)(FILE*)>;

// Draws what the script says to standard output, which is `png`. Standard input, since no name of a file then stands in
// a script. False where there is no gnuplot.
absl::StatusOr<bool> RunGnuplot(absl::string_view script, int png) {
  const FilePointer input(std::tmpfile(), std::fclose);
  if (input == nullptr || std::fwrite(script.data(), 1, script.size(), input.get()) != script.size() ||
      std::fflush(input.get()) != 0) {
    return absl::UnknownError(absl::StrCat("a temporary file can't be written: ", std::strerror(errno)));
  }
  std::rewind(input.get());
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(input.get()), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, png, STDOUT_FILENO);
  char name[] = "gnuplot";
  char* const arguments[] = {name, nullptr};
  pid_t child = 0;
  const int failed = posix_spawnp(&child, name, &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed == ENOENT) return false;
  if (failed != 0) return absl::UnknownError(absl::StrCat("gnuplot can't be started: ", std::strerror(failed)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return absl::UnknownError(absl::StrCat("gnuplot ended with status ", WEXITSTATUS(status)));
  }
  return true;
}

absl::Status NoGnuplot() {
  return absl::FailedPreconditionError("--plot takes gnuplot, which is not on the PATH; Debian has it as gnuplot-nox");
}

// 1 / (1 - share of the calls) and milliseconds, a point a line: a tenth of the calls that are left at each tick.
std::string Points(const Latencies& latencies) {
  constexpr int kPointsATick = 20;
  std::string points;
  const auto count = static_cast<double>(latencies.count());
  for (int i = 0; latencies.count() > 0; ++i) {
    const double calls_a_slower = std::min(std::pow(10, static_cast<double>(i) / kPointsATick), count);
    absl::StrAppendFormat(&points, "%g %g\n", calls_a_slower,
                          absl::ToDoubleMilliseconds(latencies.Quantile(1 - 1 / calls_a_slower)));
    if (calls_a_slower == count) break;
  }
  return points;
}

std::string Quoted(absl::string_view text) { return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "''"}}), "'"); }

std::string Script(const BenchReport& report) {
  const LoadTotals& measured = report.measured;
  std::string script = absl::StrFormat(
      "set terminal pngcairo noenhanced size 1000,600\n"
      "set title %s\n"
      "set xlabel 'percentile of calls'\nset ylabel 'latency, ms'\nset grid\nset key left top\n"
      "set logscale xy\n"
      "set xtics ('0' 1, '50' 2, '90' 10, '99' 100, '99.9' 1e3, '99.99' 1e4, '99.999' 1e5, '99.9999' 1e6)\n"
      "set xrange [1:*] noextend\n",
      Quoted(absl::StrFormat("%s: %.1f calls/s, %d rows each, %d %s, %s", report.target,
                             static_cast<double>(measured.calls()) / absl::ToDoubleSeconds(measured.elapsed),
                             report.shape.rows, report.flags.clients, report.flags.clients == 1 ? "client" : "clients",
                             report.flags.rate > 0 ? "open loop" : "closed loop")));
  std::string curves;
  const auto add = [&](const char* name, const KindTotals& kind) {
    if (kind.calls == 0) return;
    absl::StrAppend(&script, "$", name, " << END\n", Points(kind.latencies), "END\n");
    absl::StrAppend(&curves, curves.empty() ? "plot " : ", ", "$", name, " with linespoints lw 2 pt 7 ps 0.5 title '",
                    name, "'");
  };
  add("forward", measured.forward);
  add("backward", measured.backward);
  return absl::StrCat(script, curves, "\n");
}

}  // namespace

absl::Status CheckGnuplot() {
  SHARDMLP_ASSIGN_OR_RETURN(const bool found, RunGnuplot("", STDERR_FILENO));
  return found ? absl::OkStatus() : NoGnuplot();
}

absl::Status PlotBench(const BenchReport& report, const std::string& path) {
  if (report.measured.calls() == 0) return absl::FailedPreconditionError("no call was answered: nothing to draw");
  const FilePointer png(std::fopen(path.c_str(), "we"), std::fclose);
  if (png == nullptr) return absl::FailedPreconditionError(absl::StrCat(path, ": ", std::strerror(errno)));
  SHARDMLP_ASSIGN_OR_RETURN(const bool drawn, RunGnuplot(Script(report), fileno(png.get())));
  return drawn ? absl::OkStatus() : NoGnuplot();
}

}  // namespace shardmlp
