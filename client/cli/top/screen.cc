#include "client/cli/top/screen.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmlp {
namespace {

// ECMA-48, and xterm's private modes.
constexpr absl::string_view kEnter = "\x1b[?1049h\x1b[?25l";  // the alternate screen, no cursor
constexpr absl::string_view kLeave = "\x1b[?25h\x1b[?1049l";
constexpr absl::string_view kHome = "\x1b[H";
constexpr absl::string_view kClearLine = "\x1b[K";
constexpr absl::string_view kClearRest = "\x1b[J";

// Texts of others, such as a run's name, do nothing to the terminal.
std::string Harmless(std::string line) {
  for (char& c : line) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return line;
}

void Write(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // the terminal is gone
    text.remove_prefix(static_cast<size_t>(count));
  }
}

// Ctrl-Z: whoever has the terminal meanwhile finds it as it was.
void Suspend(int /*signal*/) {
  Write(kLeave);
  raise(SIGSTOP);
  Write(kEnter);
}

}  // namespace

Screen::Screen() {
  struct sigaction action = {};
  action.sa_handler = &Suspend;
  sigaction(SIGTSTP, &action, nullptr);
  Write(kEnter);
}
Screen::~Screen() {
  Write(kLeave);
  std::signal(SIGTSTP, SIG_DFL);
}

void Screen::Draw(const std::vector<std::string>& lines) {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) {
    size.ws_row = 24;
    size.ws_col = 80;
  }
  std::string frame(kHome);
  const size_t rows = std::min<size_t>(lines.size(), size.ws_row);
  for (size_t row = 0; row < rows; ++row) {
    absl::StrAppend(&frame, Harmless(lines[row].substr(0, size.ws_col)), kClearLine, row + 1 < rows ? "\r\n" : "");
  }
  absl::StrAppend(&frame, kClearRest);
  Write(frame);
}

}  // namespace shardmlp
