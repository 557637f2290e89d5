// Bearer tokens: which calls come in, what the others are told, and files that are none.
#include "server/rpc/tokens.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/rpc/raw_call.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr char kToken[] = "correct-horse-battery";
constexpr char kOther[] = "0123456789abcdef";

std::string FileOf(const std::string& text) {
  const std::string path =
      absl::StrCat(testing::TempDir(), "/", testing::UnitTest::GetInstance()->current_test_info()->name(), ".tokens");
  std::ofstream(path) << text;
  return path;
}

absl::Status CheckOf(const Tokens& tokens, const std::vector<std::string>& values) {
  std::multimap<grpc::string_ref, grpc::string_ref> metadata = {{"user-agent", "test"}};
  for (const std::string& value : values) metadata.emplace("authorization", value);
  return tokens.Check(metadata);
}

TEST(TokensTest, AnyOfTheFilesTokensComesIn) {
  Tokens tokens(FileOf(absl::StrCat(kToken, "\n\n  ", kOther, "\r\n")));
  ASSERT_TRUE(tokens.Read().ok());
  for (const char* value : {"Bearer correct-horse-battery", "bearer 0123456789abcdef", "BEARER 0123456789abcdef"}) {
    EXPECT_TRUE(CheckOf(tokens, {value}).ok()) << value;
  }
}

TEST(TokensTest, AnythingElseIsToldWhatIsWrongAndNoToken) {
  Tokens tokens(FileOf(kToken));
  ASSERT_TRUE(tokens.Read().ok());
  const auto refusal = [&](const std::vector<std::string>& values) {
    const absl::Status status = CheckOf(tokens, values);
    ExpectStatus(status, absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated);
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("horse")));
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({}), HasSubstr("has no token"));
  EXPECT_THAT(refusal({kToken}), HasSubstr("is no token"));
  EXPECT_THAT(refusal({absl::StrCat("Basic ", kToken)}), HasSubstr("is no token"));
  EXPECT_THAT(refusal({absl::StrCat("Bearer ", kToken), absl::StrCat("Bearer ", kOther)}), HasSubstr("once"));
  for (const std::string wrong : {"", " ", "correct-horse-batter", "correct-horse-battery ", " correct-horse-battery",
                                  "correct-horse-batterY", kOther, "correct-horse-battery\ncorrect-horse-battery"}) {
    EXPECT_THAT(refusal({absl::StrCat("Bearer ", wrong)}), HasSubstr("is none of the server's")) << wrong;
  }
}

TEST(TokensTest, BeforeAFileWasReadNobodyComesIn) {
  EXPECT_EQ(CheckOf(Tokens(FileOf(kToken)), {absl::StrCat("Bearer ", kToken)}).code(),
            absl::StatusCode::kUnauthenticated);
}

TEST(TokensTest, AFileThatIsNoneIsNamedAndChangesNothing) {
  Tokens tokens(FileOf(kToken));
  ASSERT_TRUE(tokens.Read().ok());
  for (const auto& [text, part] : {std::pair("correct-horse-battery\nshort\n", "line 2: got 5 characters"),
                                   {"correct horse battery staple", "line 1: got 28 characters"},
                                   {"correct-horse-b\xc3\xa4ttery", "in ASCII"}}) {
    const std::string path = FileOf(text);
    const absl::Status status = tokens.Read();
    ExpectStatus(status, absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, part);
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok()) << text;
  }
  std::remove(FileOf("").c_str());
  EXPECT_THAT(std::string(tokens.Read().message()), HasSubstr("No such file"));
  EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok());
  const std::string folder = FileOf("");
  std::remove(folder.c_str());
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  EXPECT_THAT(std::string(tokens.Read().message()), HasSubstr("can't read the tokens"));
  rmdir(folder.c_str());
  EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok());
}

TEST(TokensTest, TheLastTokenIsTakenBackByAFileWithNone) {
  for (const char* none : {"", "\n \r\n", "# correct-horse-battery\n", "\xef\xbb\xbf"}) {
    Tokens tokens(FileOf(kToken));
    ASSERT_TRUE(tokens.Read().ok());
    FileOf(none);
    ExpectStatus(tokens.Read(), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, "has no token");
    EXPECT_FALSE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok()) << none;
    FileOf(kOther);
    ASSERT_TRUE(tokens.Read().ok());
    EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kOther)}).ok());
  }
}

TEST(TokensTest, CommentsAndWhatEditorsAddAreNoTokens) {
  Tokens tokens(FileOf(absl::StrCat("\xef\xbb\xbf", kToken, "\n# of the second team, since May\n  #short\n", kOther)));
  ASSERT_TRUE(tokens.Read().ok()) << tokens.Read();
  EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok());
  EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kOther)}).ok());
  EXPECT_FALSE(CheckOf(tokens, {"Bearer # of the second team, since May"}).ok());
}

TEST(TokensTest, ANewFileTakesTheOldOnesPlace) {
  Tokens tokens(FileOf(kToken));
  ASSERT_TRUE(tokens.Read().ok());
  FileOf(kOther);
  ASSERT_TRUE(tokens.Read().ok());
  EXPECT_TRUE(CheckOf(tokens, {absl::StrCat("Bearer ", kOther)}).ok());
  EXPECT_FALSE(CheckOf(tokens, {absl::StrCat("Bearer ", kToken)}).ok());
}

class TokenServerTest : public RpcTest {
 protected:
  void Start() {
    RpcServerOptions options;
    options.token_file = FileOf(kToken);
    RpcTest::Start({}, options);
  }
};

TEST_F(TokenServerTest, EachRpcOfEachServiceNeedsOne) {
  Start();
  server_->drain_request().End(DrainSummary{});  // so that a drain is answered
  int count = 0;
  for (const char* name :
       {"shardmlp.v1.Compute", "shardmlp.v1.Training", "shardmlp.v1.Model", "shardmlp.v1.Operation"}) {
    const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i, ++count) {
      const std::string method = absl::StrCat("/", name, "/", service->method(i)->name());
      for (const std::string token : {"", kOther}) {
        ExpectStatus(RawCall(channel_, method, {""}, token).status, absl::StatusCode::kUnauthenticated,
                     Reason::kUnauthenticated, token.empty() ? "has no token" : "is none of the server's");
      }
      EXPECT_NE(RawCall(channel_, method, {""}, kToken).status.code(), absl::StatusCode::kUnauthenticated) << method;
    }
  }
  EXPECT_GE(count, 14);
  EXPECT_EQ(Metric("shardmlp_failures_total{reason=\"UNAUTHENTICATED\"}"), 2 * count);
}

TEST_F(TokenServerTest, HealthNeedsNoneAndReflectionIsNotThere) {
  Start();
  EXPECT_TRUE(RawCall(channel_, "/grpc.health.v1.Health/Check", {""}).status.ok());
  const auto reflection = RawCall(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                  {std::string("\x3a\x00", 2)}, kToken);
  EXPECT_EQ(reflection.status.code(), absl::StatusCode::kUnimplemented) << reflection.status;
}

TEST_F(TokenServerTest, ACallWithoutOneSendsNoRows) {
  Start();
  const Answer answer = Forward(ForwardCall(64, 4));
  ExpectStatus(answer.status, absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated);
  EXPECT_EQ(answer.rows, "");
  engine_->AwaitOpenCalls(0);
}

TEST_F(TokenServerTest, WhetherFilesAreInOrderIsInTheMetricsAndAllThatIsWrongIsTold) {
  RpcServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.token_file = FileOf(kToken);
  options.tls = {.cert = "/nowhere/cert", .key = "/nowhere/key"};
  options.replica_ca = "/nowhere/replicas-ca";
  RpcServer server(options, metrics_);
  absl::Status found = server.Refresh();
  EXPECT_THAT(std::string(found.message()),
              AllOf(HasSubstr("/nowhere/cert"), HasSubstr("/nowhere/replicas-ca"), Not(HasSubstr("has no token"))));
  EXPECT_EQ(Metric("shardmlp_files_in_order{file=\"tokens\"}"), 1);
  EXPECT_EQ(Metric("shardmlp_files_in_order{file=\"certificate\"}"), 0);
  EXPECT_EQ(Metric("shardmlp_files_in_order{file=\"replica_ca\"}"), 0);
  FileOf("");
  found = server.Refresh();
  EXPECT_THAT(std::string(found.message()), AllOf(HasSubstr("/nowhere/cert"), HasSubstr("has no token")));
  EXPECT_EQ(Metric("shardmlp_files_in_order{file=\"tokens\"}"), 0);
}

TEST_F(TokenServerTest, AFileThatCanNotBeReadIsToldAtStart) {
  RpcServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.token_file = testing::TempDir() + "/nowhere/tokens";
  ExpectStatus(RpcServer::Listen(options, metrics_).status(), absl::StatusCode::kInvalidArgument,
               Reason::kInvalidArgument, "nowhere/tokens: No such file");
}

}  // namespace
}  // namespace shardmlp
