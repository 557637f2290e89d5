#include "client/cli/top/top.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/stop.h"
#include "client/cli/top/activity.h"
#include "client/cli/top/screen.h"
#include "client/cli/top/top_report.h"
#include "client/cli/top/window.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kLeastWindow = absl::Milliseconds(1);
constexpr int64_t kLinesUnderAHeading = 20;

struct Look {
  absl::Time time;
  std::vector<ClientSeries> metrics;
  ServedModel model;
};

absl::StatusOr<Look> LookAt(Client& client) {
  Look look;
  SHARDMLP_ASSIGN_OR_RETURN(look.metrics, client.GetMetrics());
  look.time = absl::Now();
  SHARDMLP_ASSIGN_OR_RETURN(look.model, client.GetModel());
  return look;
}

// Where reports go, one after the other.
class Display {
 public:
  Display(bool json, std::ostream& out) : json_(json), out_(out) {
    if (!json && isatty(STDOUT_FILENO)) screen_.emplace();
  }

  // Until the first report.
  void ShowBeginning(const std::string& target, absl::Duration interval) {
    if (!screen_.has_value()) return;
    screen_->Draw({absl::StrCat("shardmlpctl top  ", target),
                   absl::StrCat("what it does is shown in ", absl::FormatDuration(interval))});
  }

  void Show(const TopReport& report) {
    if (screen_.has_value()) return screen_->Draw(TopScreen(report));
    if (!json_ && shown_++ % kLinesUnderAHeading == 0) out_ << TopLineHeading();
    out_ << (json_ ? TopJson(report) : TopLine(report)) << std::flush;
  }

 private:
  const bool json_;
  std::ostream& out_;
  std::optional<Screen> screen_;
  int64_t shown_ = 0;
};

}  // namespace

absl::Status Top(const std::string& target, ClientOptions options, const TopOptions& top, std::ostream& out) {
  NoteStopSignals();
  options.interrupted = StopSignalled;
  options.retry.budget = absl::ZeroDuration();  // the next look is the next try
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(target, options));
  SHARDMLP_ASSIGN_OR_RETURN(Look last, LookAt(*client));

  Display display(top.json, out);
  display.ShowBeginning(target, top.interval);
  TopReport report{.target = target, .time = last.time, .reached = {}, .away = {}, .activity = {}, .model = {}};
  absl::Time due = last.time;
  for (int64_t shown = 0; top.count == 0 || shown < top.count; ++shown) {
    due = std::max(due + top.interval, absl::Now());
    if (!SleepUnlessStopped(due)) return absl::OkStatus();
    absl::StatusOr<Look> look = LookAt(*client);
    if (StopSignalled()) return absl::OkStatus();
    report.time = look.ok() ? look->time : absl::Now();
    const bool was_reached = std::exchange(report.reached, look.status()).ok();
    if (!look.ok() || !was_reached) report.away = report.time - last.time;
    if (look.ok()) {
      const absl::Duration between = std::max(look->time - last.time, kLeastWindow);
      report.activity = ActivityIn(Window(last.metrics, look->metrics, absl::ToDoubleSeconds(between)));
      report.model = look->model;
      last = *std::move(look);
    }
    display.Show(report);
  }
  return report.reached;
}

}  // namespace shardmlp
