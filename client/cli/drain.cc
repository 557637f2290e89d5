#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/top/activity.h"
#include "client/cli/top/window.h"
#include "client/cli/units.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(100);

std::string Open(const Window& now, const std::vector<ClientTrainer>& trainers) {
  const auto sealed =
      std::count_if(trainers.begin(), trainers.end(), [](const auto& trainer) { return trainer.sealed; });
  return absl::StrCat("waiting for the server: ", Count(now.Value("shardmlp_open_calls")), " calls open, ", sealed,
                      " of ", trainers.size(), " trainers have sealed");
}

// What is still open, whenever it has changed, until `done`.
void Watch(Client& client, const absl::Notification& done, std::ostream& progress) {
  for (std::string last; !done.WaitForNotificationWithTimeout(kLook);) {
    absl::StatusOr<std::vector<ClientSeries>> metrics = client.GetMetrics();
    const absl::StatusOr<ServedModel> model = client.GetModel();
    if (!metrics.ok() || !model.ok()) continue;  // the drain itself says why
    const std::string open = Open(Window({}, *std::move(metrics), 1), model->trainers);
    if (open != last) progress << (last = open) << std::endl;
  }
}

// Whether the server with those weights is there no more, though another may be in its place.
bool Gone(Client& client, int64_t weights_version) {
  const absl::StatusOr<ServedModel> model = client.GetModel();
  return model.ok() ? model->position.weights_version != weights_version : absl::IsUnavailable(model.status());
}

void Print(const ClientDrain& left, std::ostream& out) {
  out << absl::StreamFormat("drained at step %d, and gone\n", left.position.step);
  if (left.checkpoint.has_value()) {
    out << absl::StreamFormat("saved %s: step %d, %d bytes\n", left.checkpoint->name, left.checkpoint->step,
                              left.checkpoint->byte_count);
  }
  if (left.cut_off) out << "CUT OFF: calls were still open when its --drain-timeout was over\n";
  if (left.step_undecided) out << "UNDECIDED: a sealed step was left to its trainers, which redo it or find it done\n";
}

void PrintAsJson(const ClientDrain& left, std::ostream& out) {
  nlohmann::ordered_json json = {{"step", left.position.step},
                                 {"checkpoint", nullptr},
                                 {"cut_off", left.cut_off},
                                 {"step_undecided", left.step_undecided}};
  if (left.checkpoint.has_value()) {
    json["checkpoint"] = {
        {"name", left.checkpoint->name}, {"step", left.checkpoint->step}, {"byte_count", left.checkpoint->byte_count}};
  }
  out << json.dump() << "\n";
}

}  // namespace

absl::StatusOr<bool> Drain(Client& client, absl::Duration timeout, bool json, std::ostream& progress,
                           std::ostream& out) {
  const absl::Time deadline = absl::Now() + timeout;
  absl::StatusOr<ClientDrain> left;
  absl::Notification drained;
  std::thread asking([&] {
    left = client.Drain(timeout);
    drained.Notify();
  });
  Watch(client, drained, progress);
  asking.join();
  if (absl::IsDeadlineExceeded(left.status())) {
    return Annotate(left.status(), "the server has not drained in time, and goes on");
  }
  if (ReasonOf(left.status()) == Reason::kUnspecified && absl::IsUnavailable(left.status())) {
    return Annotate(left.status(), "the server went away without a word of what it left");
  }
  if (!left.ok()) return left.status();
  while (!Gone(client, left->position.weights_version)) {
    if (absl::Now() > deadline) return absl::DeadlineExceededError("the server has drained, and is still there");
    absl::SleepFor(kLook);
  }
  json ? PrintAsJson(*left, out) : Print(*left, out);
  return !left->cut_off && !left->step_undecided;
}

}  // namespace shardmlp
