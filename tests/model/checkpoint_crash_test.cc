// A save that is cut off at any system call that changes the disk leaves the old checkpoint or the new one, whole.
//
// This program's own write, fsync, rename, renameat2, mkdir and unlinkat stand in for the C library's: they count the
// calls, and end the process at a given one, or make it fail. So does its statvfs, which says what room there is.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint.h"
#include "tests/model/checkpoint_fixture.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

constexpr int kNever = -1;

struct Disk {
  bool watched = false;
  int calls = 0;
  int dies_at = kNever;   // the process ends instead of this call
  int fails_at = kNever;  // `error` instead of this call
  int error = EIO;
  bool exchanges = true;  // renameat2 knows RENAME_EXCHANGE
  unsigned long free_bytes = 1 << 30;
  std::vector<std::string> log;
};
Disk disk;

// Counts a call; false where it is to fail.
bool Allows(const std::string& call) {
  if (!disk.watched) return true;
  if (disk.calls == disk.dies_at) _exit(0);
  disk.log.push_back(call);
  return disk.calls++ != disk.fails_at;
}

std::string NameOf(int descriptor) {
  return std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", descriptor)).filename();
}

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace
}  // namespace shardmlp

using shardmlp::Allows;
using shardmlp::disk;
using shardmlp::Fail;

extern "C" {

ssize_t write(int descriptor, const void* bytes, size_t size) {
  if (descriptor > 2 && !Allows("write")) return Fail(disk.error);
  return syscall(SYS_write, descriptor, bytes, size);
}

int fsync(int descriptor) {
  if (!Allows(absl::StrCat("sync ", shardmlp::NameOf(descriptor)))) return Fail(disk.error);
  return static_cast<int>(syscall(SYS_fsync, descriptor));
}

int rename(const char* from, const char* to) noexcept {
  if (!Allows("rename")) return Fail(disk.error);
  return static_cast<int>(syscall(SYS_rename, from, to));
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (!disk.exchanges) return Fail(EINVAL);
  if (!Allows("exchange")) return Fail(disk.error);
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (!Allows("mkdir")) return Fail(disk.error);
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  if (!Allows("unlink")) return Fail(disk.error);
  return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
}

int statvfs(const char*, struct statvfs* found) noexcept {
  *found = {};
  found->f_frsize = 1;
  found->f_blocks = 1 << 30;
  found->f_bfree = found->f_bavail = disk.free_bytes;
  return 0;
}

}  // extern "C"

namespace shardmlp {
namespace {

class CheckpointCrashTest : public testing::TestWithParam<bool> {
 protected:
  CheckpointCrashTest() { Watch(); }
  ~CheckpointCrashTest() override { disk = Disk{}; }

  static void Watch() {
    disk = Disk{};
    disk.exchanges = GetParam();
  }
  std::unique_ptr<CheckpointStore> Open() const {
    auto store = CheckpointStore::Open(folder_.path(), model_);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  absl::Status SaveWatched(char step) const {
    const auto store = Open();
    disk.watched = true;
    const absl::Status status = store->Save("one", StateOf(model_, step)).status();
    disk.watched = false;
    return status;
  }
  // Saves in a process of its own that ends at the given call; true where it got to the end.
  bool SaveAndDie(char step, int dies_at) const {
    const pid_t child = fork();
    if (child == 0) {
      Watch();
      disk.dies_at = dies_at;
      _exit(SaveWatched(step).ok() ? 1 : 2);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_NE(WEXITSTATUS(status), 2);
    return WEXITSTATUS(status) == 1;
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  const TempFolder folder_;
  const ModelSpec model_ = SmallModel();
};

TEST_P(CheckpointCrashTest, AtEveryCallTheNameStandsForTheOldOneOrTheNewOne) {
  ASSERT_TRUE(SaveWatched(1).ok());
  int old_ones = 0;
  int new_ones = 0;
  int64_t current = 1;
  for (int call = 0; true; ++call) {
    const char step = static_cast<char>(call + 2);
    const bool finished = SaveAndDie(step, call);
    // A save must not be lost to anyone who loads without recovering either, where the names change places at once.
    if (GetParam()) {
      EXPECT_TRUE(std::filesystem::exists(folder_ / "one/manifest.json")) << call;
    }
    const auto found = WholeStep(*Open(), "one", model_);
    ASSERT_TRUE(found.ok()) << "call " << call << ": " << found.status();
    EXPECT_THAT(*found, testing::AnyOf(current, step)) << call;
    EXPECT_THAT(Names(), testing::ElementsAre("one")) << call;
    ++(*found == step ? new_ones : old_ones);
    current = *found;
    if (finished) {
      EXPECT_EQ(current, step);
      break;
    }
  }
  EXPECT_GT(old_ones, 10);
  EXPECT_GT(new_ones, 2);
}

TEST_P(CheckpointCrashTest, AFirstSaveIsThereWholeOrNotAtAll) {
  for (int call = 0; true; ++call) {
    const bool finished = SaveAndDie(1, call);
    const auto found = WholeStep(*Open(), "one", model_);
    EXPECT_TRUE(found.ok() || absl::IsNotFound(found.status())) << "call " << call << ": " << found.status();
    EXPECT_LE(Names().size(), 1);
    if (finished) break;
    std::filesystem::remove_all(folder_ / "one");
  }
  EXPECT_EQ(*WholeStep(*Open(), "one", model_), 1);
}

TEST_P(CheckpointCrashTest, ACallThatFailsLeavesTheOldOneOrTheNewOneAtOnce) {
  ASSERT_TRUE(SaveWatched(1).ok());
  const auto store = Open();
  int64_t current = 1;
  int failures = 0;
  for (int call = 0; true; ++call) {
    const char step = static_cast<char>(call + 2);
    Watch();
    disk.fails_at = call;
    const absl::Status saved = SaveWatched(step);
    const bool finished = disk.calls <= call;
    disk.fails_at = kNever;
    const auto found = WholeStep(*store, "one", model_);
    ASSERT_TRUE(found.ok()) << "call " << call << ": " << found.status();
    EXPECT_THAT(*found, testing::AnyOf(current, step)) << call;
    EXPECT_TRUE(!saved.ok() || *found == step) << call << ": " << *found;
    failures += saved.ok() ? 0 : 1;
    current = *found;
    if (finished) {
      EXPECT_TRUE(saved.ok()) << saved;
      break;
    }
  }
  EXPECT_GT(failures, 10);
  EXPECT_THAT(Names(), testing::ElementsAre("one"));
}

TEST_P(CheckpointCrashTest, ADiskWithoutRoomForTwoIsFoundBeforeAnythingIsWritten) {
  ASSERT_TRUE(SaveWatched(1).ok());
  const int64_t tensors = 2 * 3 * 2;  // layers, matrices, each as weights and as moments
  const int64_t bytes = tensors * 4 * 6 * 4;
  Watch();
  disk.free_bytes = bytes - 1;
  EXPECT_TRUE(Fails(SaveWatched(2), absl::StatusCode::kResourceExhausted, Reason::kStorageFull,
                    {"takes 1152 bytes", "has 1151 free"}));
  EXPECT_THAT(disk.log, testing::IsEmpty());
  EXPECT_EQ(*WholeStep(*Open(), "one", model_), 1);
  disk.free_bytes = bytes;
  EXPECT_TRUE(SaveWatched(3).ok());
}

// What clients go by: a full disk stays full, so that trying again would only take time.
TEST_P(CheckpointCrashTest, ADiskThatIsFullIsSaidToBe) {
  const auto fails_with = [this](int call, int error) {
    Watch();
    disk.fails_at = call;
    disk.error = error;
    return SaveWatched(1);
  };
  int calls = 0;
  for (; !fails_with(calls, ENOSPC).ok(); ++calls) {
    const int call = calls;
    for (const int full : {ENOSPC, EDQUOT}) {
      EXPECT_TRUE(Fails(fails_with(call, full), absl::StatusCode::kResourceExhausted, Reason::kStorageFull,
                        {folder_.path(), "make room"}))
          << call;
    }
    for (const int broken : {EIO, EROFS, EACCES, EBUSY, EMFILE}) {
      EXPECT_TRUE(Fails(fails_with(call, broken), absl::StatusCode::kInternal, Reason::kStorageFailed,
                        {folder_.path(), std::strerror(broken)}))
          << call;
    }
    ASSERT_LT(call, 100);
  }
  EXPECT_GT(calls, 10) << "only what cleans up after a save may fail without a word";
}

// What a power cut would undo has to be on disk before the name is.
TEST_P(CheckpointCrashTest, EverythingIsSyncedBeforeItHasItsName) {
  ASSERT_TRUE(SaveWatched(1).ok());
  Watch();
  ASSERT_TRUE(SaveWatched(2).ok());
  std::vector<std::string> order;
  for (const std::string& call : disk.log) {
    if (call != "write" && call != "unlink") order.push_back(call);
  }
  const std::string folder = "sync " + std::filesystem::path(folder_.path()).filename().string();
  std::vector<std::string> expected = {"mkdir", "sync weights.safetensors", "sync optimizer.safetensors",
                                       "sync manifest.json", "sync .saving-one"};
  const std::vector<std::string> renames =
      GetParam() ? std::vector<std::string>{"exchange"} : std::vector<std::string>{"rename", "rename"};
  expected.insert(expected.end(), renames.begin(), renames.end());
  expected.push_back(folder);
  expected.push_back(folder);  // after the removal of what was replaced
  EXPECT_EQ(order, expected);
}

INSTANTIATE_TEST_SUITE_P(FileSystems, CheckpointCrashTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "ThatExchangeNames" : "ThatRenameOneAtATime"; });

}  // namespace
}  // namespace shardmlp
