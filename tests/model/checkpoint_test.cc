// Checkpoints: what is saved is what is loaded, or a refusal that names what is wrong.
#include "server/model/checkpoint.h"

#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/checkpoint_folder.h"
#include "server/model/checksum.h"
#include "tests/model/checkpoint_fixture.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

using testing::ElementsAre;

constexpr const char* kFiles[] = {"weights.safetensors", "optimizer.safetensors", "manifest.json"};

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    auto store = CheckpointStore::Open(folder_ / "made/here", model_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void Save(const std::string& name, char step) {
    const auto saved = store_->Save(name, StateOf(model_, step));
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(saved->step, step);
  }
  std::string Path(const std::string& name) const { return folder_ / "made/here/" + name; }
  std::vector<std::string> ListedNames() const {
    std::vector<std::string> names;
    const auto infos = store_->List();
    for (const CheckpointInfo& info : *infos) names.push_back(info.name);
    return names;
  }
  testing::AssertionResult LoadIsCorrupt(std::initializer_list<absl::string_view> named) const {
    return Fails(store_->Load("one"), absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, named);
  }

  const TempFolder folder_;
  const ModelSpec model_ = SmallModel();
  std::unique_ptr<CheckpointStore> store_;
};

TEST_F(CheckpointTest, WhatIsSavedIsLoaded) {
  Save("one", 7);
  const auto checkpoint = store_->Load("one");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->step(), 7);
  EXPECT_EQ(CheckWhole(**checkpoint, model_), absl::OkStatus());
  EXPECT_TRUE((*checkpoint)->Has("model.layers.1.mlp.up_proj.weight"));
  EXPECT_TRUE((*checkpoint)->Has("model.layers.1.mlp.up_proj.weight.moment1"));
  EXPECT_FALSE((*checkpoint)->Has("model.layers.1.mlp.up_proj.weight.moment2"));
}

TEST_F(CheckpointTest, ASaveReplacesItsNameAndLeavesNothingElse) {
  Save("one", 7);
  const auto before = store_->Load("one");
  Save("one", 8);
  EXPECT_EQ(*WholeStep(*store_, "one", model_), 8);
  EXPECT_EQ(CheckWhole(**before, model_), absl::OkStatus());  // one that is open stays what it was
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(Path(""))) names.push_back(entry.path().filename());
  EXPECT_THAT(names, ElementsAre("one"));
}

TEST_F(CheckpointTest, ListsTheOldestFirst) {
  EXPECT_THAT(ListedNames(), ElementsAre());
  Save("b", 1);
  Save("c", 2);
  Save("a", 3);
  EXPECT_THAT(ListedNames(), ElementsAre("b", "c", "a"));
  Save("b", 4);
  EXPECT_THAT(ListedNames(), ElementsAre("c", "a", "b"));
  const CheckpointInfo newest = store_->List()->back();
  EXPECT_EQ(newest.step, 4);
  EXPECT_EQ(newest.byte_count, std::filesystem::file_size(Path("b/weights.safetensors")) +
                                   std::filesystem::file_size(Path("b/optimizer.safetensors")));
}

TEST_F(CheckpointTest, ListsWholeOnesAlone) {
  Save("whole", 1);
  Save("cut", 2);
  Save("bare", 3);
  std::filesystem::resize_file(Path("cut/optimizer.safetensors"), 100);
  std::filesystem::remove(Path("bare/manifest.json"));
  std::filesystem::create_directory(Path("other"));
  WriteFile(Path("file"), "");
  EXPECT_THAT(ListedNames(), ElementsAre("whole"));
}

TEST_F(CheckpointTest, TheLatestIsTheNewestOfThem) {
  EXPECT_EQ(*store_->Latest(), "");
  Save("b", 1);
  Save("a", 2);
  std::filesystem::create_directory(Path("other"));
  WriteFile(Path("other/notes"), "of someone else");
  EXPECT_EQ(*store_->Latest(), "a");
}

TEST_F(CheckpointTest, ADamagedOneThatMayBeTheLatestIsNotPassedOver) {
  Save("old", 1);
  Save("new", 2);
  const auto refuses = [this](std::initializer_list<absl::string_view> named) {
    return Fails(store_->Latest(), absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, named);
  };
  for (const char* file : kFiles) {
    const std::string path = Path(absl::StrCat("new/", file));
    const std::string bytes = ReadFile(path);
    WriteFile(path, bytes.substr(0, bytes.size() / 2));
    EXPECT_TRUE(refuses({path, "checkpoint new", "old is the latest whole one"})) << "cut";
    std::filesystem::remove(path);
    EXPECT_TRUE(refuses({path, "missing", "checkpoint new"}));
    WriteFile(path, bytes);
    EXPECT_EQ(*store_->Latest(), "new");
  }
  // A manifest that can't be read says no time, so it may be the newest.
  std::filesystem::remove(Path("old/manifest.json"));
  EXPECT_TRUE(refuses({"old/manifest.json is missing", "new is the latest whole one"}));
  std::filesystem::remove(Path("new/weights.safetensors"));
  EXPECT_TRUE(refuses({"no other is whole"}));
}

TEST_F(CheckpointTest, ADamagedOneThatIsOlderIsPassedOver) {
  Save("old", 1);
  Save("new", 2);
  std::filesystem::resize_file(Path("old/weights.safetensors"), 10);
  EXPECT_EQ(*store_->Latest(), "new");
}

TEST_F(CheckpointTest, AnotherProcessThatSavesIsLeftAlone) {
  std::filesystem::create_directory(Path(".saving-other"));
  {
    const auto lock = LockFolder(Path(""));  // as the other process holds it
    ASSERT_TRUE(lock.ok()) << lock.status();
    EXPECT_TRUE(Fails(store_->Save("one", StateOf(model_, 1)), absl::StatusCode::kUnavailable, Reason::kOverloaded,
                      {"another process is saving"}));
    EXPECT_TRUE(CheckpointStore::Open(Path(""), model_).ok());
    EXPECT_TRUE(std::filesystem::exists(Path(".saving-other")));
  }
  EXPECT_TRUE(CheckpointStore::Open(Path(""), model_).ok());
  EXPECT_FALSE(std::filesystem::exists(Path(".saving-other")));
  Save("one", 1);
}

TEST_F(CheckpointTest, ADeletedOneIsGoneWithItsFilesAndNothingElse) {
  Save("one", 7);
  Save("two", 8);
  const auto deleted = store_->Delete("one");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->step, 7);
  EXPECT_GT(deleted->byte_count, 0);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(Path(""))) names.push_back(entry.path().filename());
  EXPECT_THAT(names, ElementsAre("two"));
  EXPECT_TRUE(
      Fails(store_->Delete("one"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint, {"checkpoint one"}));
  // A damaged one can be deleted too.
  std::filesystem::remove(Path("two/manifest.json"));
  EXPECT_TRUE(store_->Delete("two").ok());
  EXPECT_TRUE(std::filesystem::is_empty(Path("")));
}

TEST_F(CheckpointTest, NothingOutsideTheFolderIsDeleted) {
  Save("one", 7);
  // A checkpoint elsewhere, reached by a name, by a link in its place, and by one among its files.
  const std::string outside = folder_ / "outside";
  std::filesystem::copy(Path("one"), outside);
  std::filesystem::create_directory_symlink(outside, Path("link"));
  std::filesystem::create_directory_symlink(outside, Path("one/link"));
  for (const char* name : {"../../outside", "..", ".", "", "one/../../../outside", "/"}) {
    EXPECT_TRUE(Fails(store_->Delete(name), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, {name}))
        << name;
  }
  EXPECT_TRUE(store_->Delete("link").ok());
  EXPECT_TRUE(store_->Delete("one").ok());
  EXPECT_TRUE(std::filesystem::is_empty(Path("")));
  for (const char* file : kFiles) EXPECT_TRUE(std::filesystem::exists(absl::StrCat(outside, "/", file))) << file;
}

TEST_F(CheckpointTest, WhatIsNoCheckpointIsNotDeleted) {
  WriteFile(Path("notes"), "mine");
  std::filesystem::create_directory(Path("folder"));
  WriteFile(Path("folder/notes"), "mine");
  for (const char* name : {"notes", "folder"}) {
    EXPECT_TRUE(Fails(store_->Delete(name), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                      {"is no checkpoint; it is not deleted"}));
  }
  EXPECT_EQ(ReadFile(Path("folder/notes")), "mine");
}

TEST_F(CheckpointTest, OneThatIsLoadedOrSavedElsewhereIsNotDeleted) {
  Save("one", 7);
  {
    const auto loaded = store_->Load("one");  // as another process has it, whose locks are its own
    EXPECT_TRUE(Fails(store_->Delete("one"), absl::StatusCode::kUnavailable, Reason::kOverloaded,
                      {"another process is restoring"}));
    EXPECT_EQ(CheckWhole(**loaded, model_), absl::OkStatus());
  }
  {
    const auto lock = LockFolder(Path(""));
    EXPECT_TRUE(Fails(store_->Delete("one"), absl::StatusCode::kUnavailable, Reason::kOverloaded,
                      {"another process is saving"}));
  }
  EXPECT_EQ(*WholeStep(*store_, "one", model_), 7);
  EXPECT_TRUE(store_->Delete("one").ok());
}

TEST_F(CheckpointTest, ADeletionThatWasCutOffIsFinishedByTheNextProcess) {
  Save("one", 7);
  ASSERT_EQ(Unpublish(Path(""), "one"), absl::OkStatus());  // and then the process died
  EXPECT_THAT(ListedNames(), ElementsAre());
  EXPECT_TRUE(CheckpointStore::Open(Path(""), model_).ok());
  EXPECT_TRUE(std::filesystem::is_empty(Path("")));
}

TEST_F(CheckpointTest, EachThatIsSavedIsAnEditionOfItsOwn) {
  Save("one", 7);
  const auto first = store_->Edition("one");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*store_->Edition("one"), *first);
  Save("one", 7);
  EXPECT_NE(*store_->Edition("one"), *first);
  EXPECT_FALSE(store_->Edition("two").ok());
}

TEST_F(CheckpointTest, RefusesACheckpointThatLacksAFile) {
  for (const char* file : kFiles) {
    Save("one", 7);
    std::filesystem::remove(Path(absl::StrCat("one/", file)));
    EXPECT_TRUE(LoadIsCorrupt({absl::StrCat("one/", file), "missing"}));
    std::filesystem::remove_all(Path("one"));
  }
}

TEST_F(CheckpointTest, RefusesACheckpointCutAtAnyByte) {
  Save("one", 7);
  for (const char* file : kFiles) {
    const std::string path = Path(absl::StrCat("one/", file));
    const std::string whole = ReadFile(path);
    for (size_t size = 0; size < whole.size(); size += 13) {
      WriteFile(path, whole.substr(0, size));
      EXPECT_TRUE(LoadIsCorrupt({path})) << "cut to " << size;
    }
    WriteFile(path, whole + "\n");
    EXPECT_TRUE(LoadIsCorrupt({path})) << "longer";
    WriteFile(path, whole);
  }
  EXPECT_EQ(*WholeStep(*store_, "one", model_), 7);
}

TEST_F(CheckpointTest, RefusesACheckpointWithAnyBitFlipped) {
  Save("one", 7);
  for (const char* file : kFiles) {
    const std::string path = Path(absl::StrCat("one/", file));
    const std::string bytes = ReadFile(path);
    for (size_t i = 0; i < bytes.size(); ++i) {
      WriteByte(path, i, static_cast<char>(bytes[i] ^ 1 << i % 8));
      EXPECT_TRUE(LoadIsCorrupt({path})) << "byte " << i;
      WriteByte(path, i, bytes[i]);
    }
  }
  EXPECT_EQ(*WholeStep(*store_, "one", model_), 7);
}

TEST_F(CheckpointTest, RefusesFilesThatChangedPlaces) {
  Save("one", 7);
  Save("two", 8);
  for (const char* file : kFiles) {
    std::filesystem::rename(Path(absl::StrCat("one/", file)), Path("held"));
    std::filesystem::copy(Path(absl::StrCat("two/", file)), Path(absl::StrCat("one/", file)));
    EXPECT_TRUE(LoadIsCorrupt({"/one/"}));
    std::filesystem::rename(Path("held"), Path(absl::StrCat("one/", file)));
  }
}

TEST_F(CheckpointTest, RefusesAManifestOfAnotherFormatByItsVersion) {
  Save("one", 7);
  // A manifest that is whole, of a later version: made by another hand, with its checksum.
  constexpr char kLater[] = "{\n  \"checksum\": \"%s\",\n  \"format_version\": 3\n}\n";
  Checksum checksum;
  checksum.Add(absl::StrFormat(kLater, ""));
  WriteFile(Path("one/manifest.json"), absl::StrFormat(kLater, ToHex(checksum.sum().xxh3_64)));
  EXPECT_TRUE(Fails(store_->Load("one"), absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch,
                    {"format_version is 3", "2 was expected"}));
}

TEST_F(CheckpointTest, RefusesTheCheckpointOfAnotherModel) {
  Save("one", 7);
  const auto load_as = [&](const ModelSpec& model) { return (*CheckpointStore::Open(Path(""), model))->Load("one"); };
  const auto is_mismatch = [&](const ModelSpec& model, std::initializer_list<absl::string_view> named) {
    return Fails(load_as(model), absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch, named);
  };
  EXPECT_TRUE(load_as(model_).ok());
  EXPECT_TRUE(is_mismatch(SmallModel(DType::kBF16), {"dtype is f32", "bf16"}));
  ModelSpec other = model_;
  other.model_type = "mistral";
  EXPECT_TRUE(is_mismatch(other, {"model_type is llama", "mistral"}));
  other = model_;
  other.tensors.pop_back();
  EXPECT_TRUE(is_mismatch(other, {"model.layers.1.mlp.down_proj.weight is not served"}));
  other = model_;
  other.tensors.push_back(other.tensors.back());
  other.tensors.back().name = "model.layers.2.mlp.gate_proj.weight";
  EXPECT_TRUE(is_mismatch(other, {"lacks tensor model.layers.2.mlp.gate_proj.weight"}));
  other = model_;
  other.tensors[0].shape = {4, 6};
  EXPECT_TRUE(is_mismatch(other, {"model.layers.0.mlp.gate_proj.weight", "[6, 4]", "[4, 6]"}));
}

TEST_F(CheckpointTest, ReadsATensorInItsOwnTypeAndSizeAlone) {
  Save("one", 7);
  const auto checkpoint = store_->Load("one");
  const std::string name = model_.tensors[0].name;
  std::vector<char> out(6 * 4 * 4);
  const auto is_mismatch = [&](const std::string& tensor, DType dtype, absl::Span<char> to, absl::string_view named) {
    return Fails((*checkpoint)->Read(tensor, dtype, to), absl::StatusCode::kFailedPrecondition,
                 Reason::kCheckpointMismatch, {tensor, named});
  };
  EXPECT_TRUE(is_mismatch(name, DType::kBF16, absl::MakeSpan(out), "is F32"));
  EXPECT_TRUE(is_mismatch(name, DType::kF32, absl::MakeSpan(out).first(92), "in 96 bytes"));
  EXPECT_TRUE(is_mismatch(name + ".moment2", DType::kF32, absl::MakeSpan(out), "lack tensor"));
}

TEST_F(CheckpointTest, RefusesNamesThatAreNone) {
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string(".hidden"),
                                  std::string("a/b"), std::string("../a"), std::string("a b"), std::string("a\0b", 3),
                                  std::string("\xc3\xa9"), std::string(129, 'a')}) {
    EXPECT_TRUE(Fails(store_->Save(name, StateOf(model_, 1)), absl::StatusCode::kInvalidArgument,
                      Reason::kInvalidArgument, {"checkpoint name"}));
    EXPECT_TRUE(
        Fails(store_->Load(name), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, {"checkpoint name"}));
  }
  for (const std::string& name : {std::string("A-1_b.2"), std::string(128, 'a')}) Save(name, 1);
  EXPECT_TRUE(
      Fails(store_->Load("none"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint, {"no checkpoint none"}));
}

TEST_F(CheckpointTest, RefusesAStateThatIsNotTheModels) {
  CheckpointState state = StateOf(model_, 1);
  state.weights.pop_back();
  state.updates.pop_back();
  EXPECT_TRUE(Fails(store_->Save("one", state), absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch,
                    {"lacks tensor model.layers.1.mlp.down_proj.weight"}));
  state = StateOf(model_, 1);
  state.updates.pop_back();
  EXPECT_TRUE(Fails(store_->Save("one", state), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                    {"5 update histories for 6 weights"}));
}

TEST_F(CheckpointTest, LeavesAloneWhatIsNoCheckpoint) {
  std::filesystem::create_directory(Path("letters"));
  WriteFile(Path("letters/first"), "dear");
  WriteFile(Path("file"), "text");
  for (const char* name : {"letters", "file"}) {
    EXPECT_TRUE(Fails(store_->Save(name, StateOf(model_, 1)), absl::StatusCode::kInvalidArgument,
                      Reason::kInvalidArgument, {name, "is no checkpoint"}));
  }
  EXPECT_EQ(ReadFile(Path("letters/first")), "dear");
  EXPECT_EQ(ReadFile(Path("file")), "text");
}

}  // namespace
}  // namespace shardmlp
