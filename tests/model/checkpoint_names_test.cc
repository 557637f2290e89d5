// Names of checkpoints come from clients: none of them leads out of the folder, whatever it is made of.
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint_folder.h"
#include "tests/model/checkpoint_fixture.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

namespace fs = std::filesystem;

constexpr int kDrawn = 3000;
// Parts that mean something to a file system, to this one, or to whoever prints a name.
const std::vector<std::string> kParts = {"/",        "\\",
                                         "..",       ".",
                                         "~",        "one",
                                         "outside",  "a",
                                         "A-_9",     "",
                                         "%2e%2e",   "%2f",
                                         "\xc0\xaf", "\xef\xbc\x8f",
                                         "\n",       "\r",
                                         "\x7f",     " ",
                                         "\t",       ":",
                                         ".saving-", ".replaced-one",
                                         "latest",   "$HOME",
                                         "`id`",     "*",
                                         "?",        "|",
                                         ";",        "&",
                                         "CON",      "manifest.json",
                                         "-rf",      "//",
                                         "/etc/",    "passwd",
                                         "\x1b[2J",  "\xf0\x9f\x92\xa9"};

std::string DrawName(std::mt19937& random) {
  std::string name;
  for (int parts = std::uniform_int_distribution<int>(1, 6)(random); parts > 0; --parts) {
    const std::string& part = kParts[std::uniform_int_distribution<size_t>(0, kParts.size() - 1)(random)];
    name += part;
    if (part == "~" || part.empty()) name.push_back('\0');
  }
  return name;
}

// Every path below `folder`, with the size of what is a file.
std::set<std::string> All(const std::string& folder) {
  std::set<std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    all.insert(absl::StrCat(entry.path().string(), " ", entry.is_regular_file() ? entry.file_size() : 0));
  }
  return all;
}

TEST(CheckCanSaveTest, SaysWhatWouldKeepASaveFromItsPlaceAndLeavesNothing) {
  const ModelSpec model = SmallModel();
  const TempFolder folder;
  auto store = CheckpointStore::Open(folder / "in", model);
  ASSERT_TRUE(store.ok() && (*store)->Save("one", StateOf(model, 1)).ok());
  WriteFile(folder / "in/file", "not ours");
  const std::set<std::string> before = All(folder.path());
  EXPECT_TRUE(CheckCanSave(folder / "in", "one").ok());
  EXPECT_TRUE(CheckCanSave(folder / "in", "two").ok());
  EXPECT_TRUE(CheckCanSave(folder / "to/be/made", "two").ok());
  EXPECT_TRUE(Fails(CheckCanSave(folder / "in", "../two"), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                    {"checkpoint name"}));
  EXPECT_TRUE(Fails(CheckCanSave(folder / "in", "file"), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                    {"in/file is no checkpoint"}));
  for (const char* below : {"in/file", "in/file/deeper"}) {
    EXPECT_TRUE(Fails(CheckCanSave(folder / below, "two"), absl::StatusCode::kInternal, Reason::kStorageFailed,
                      {below, "Not a directory"}));
  }
  EXPECT_EQ(All(folder.path()), before);
}

class CheckpointNamesTest : public testing::Test {
 protected:
  void SetUp() override {
    auto store = CheckpointStore::Open(folder_ / "in/here", model_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    ASSERT_TRUE(store_->Save("one", StateOf(model_, 1)).ok());
    // What a name that gets out would find: checkpoints beside the folder and above it.
    for (const char* outside : {"in/outside", "outside", "in/one", "in/a"})
      fs::copy(folder_ / "in/here/one", folder_ / outside);
  }

  // Whether all that takes a name refuses `name`, saying so.
  testing::AssertionResult IsRefused(const std::string& name) {
    for (const absl::Status& status : {store_->Save(name, StateOf(model_, 2)).status(), store_->Load(name).status(),
                                       store_->Delete(name).status()}) {
      const auto refused =
          Fails(status, absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, {"checkpoint name"});
      if (!refused) return refused;
      for (const char c : status.message()) {
        if (static_cast<unsigned char>(c) < ' ' || c == '\x7f')
          return testing::AssertionFailure() << "a raw byte is told";
      }
    }
    return testing::AssertionSuccess();
  }

  const TempFolder folder_;
  const ModelSpec model_ = SmallModel();
  std::unique_ptr<CheckpointStore> store_;
};

TEST_F(CheckpointNamesTest, WhatLeadsElsewhereIsRefused) {
  const std::set<std::string> before = All(folder_.path());
  for (const std::string& name :
       {std::string("../outside"), std::string("/"), std::string("."), std::string(".."),
        std::string("one/../../outside"), std::string("one\0", 4), std::string("one/"), std::string("..\\outside"),
        std::string(129, 'a'), std::string(".saving-one"), std::string(folder_ / "outside"), std::string()}) {
    EXPECT_TRUE(IsRefused(name)) << name;
  }
  EXPECT_EQ(All(folder_.path()), before);
}

TEST_F(CheckpointNamesTest, WhateverIsDrawnStaysInside) {
  std::mt19937 random(1);
  const std::string here = folder_ / "in/here";
  const std::set<std::string> before = All(folder_.path());
  int taken = 0;
  for (int i = 0; i < kDrawn; ++i) {
    const std::string name = DrawName(random);
    if (!CheckCheckpointName(name).ok()) {
      ASSERT_TRUE(IsRefused(name)) << "draw " << i;
      continue;
    }
    ++taken;
    // As the file system resolves it, links and all.
    const fs::path resolved = fs::weakly_canonical(fs::path(here) / name);
    ASSERT_EQ(resolved.parent_path(), fs::canonical(here)) << name;
    ASSERT_EQ(resolved.filename(), name);
  }
  EXPECT_EQ(All(folder_.path()), before) << "refused names have left something, or taken it away";
  EXPECT_GT(taken, 20) << "names that are fine were drawn too";
}

TEST_F(CheckpointNamesTest, WhatIsAllowedIsAFileInTheFolder) {
  for (const std::string& name : {std::string("a"), std::string("A-_9"), std::string("latest"),
                                  std::string("step-000100"), std::string("v1.2"), std::string(120, 'x')}) {
    ASSERT_TRUE(store_->Save(name, StateOf(model_, 3)).ok()) << name;
    EXPECT_TRUE(fs::is_directory(fs::path(folder_ / "in/here") / name)) << name;
    EXPECT_TRUE(store_->Load(name).ok()) << name;
    EXPECT_TRUE(store_->Delete(name).ok()) << name;
  }
}

}  // namespace
}  // namespace shardmlp
