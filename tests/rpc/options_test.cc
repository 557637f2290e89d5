// Command lines: what they mean, and how they are refused.
#include "server/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

absl::StatusOr<ServerOptions> Parse(const std::vector<const char*>& arguments) { return ParseOptions(arguments); }

std::string Refusal(const std::vector<const char*>& arguments) {
  const auto options = ParseOptions(arguments);
  EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << options.status();
  EXPECT_EQ(options.status().message().find('\n'), absl::string_view::npos);
  return std::string(options.status().message());
}

TEST(OptionsTest, AModelIsAllThatIsNeeded) {
  const auto options = Parse({"--model", "folder"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->model_path, "folder");
  EXPECT_THAT(options->rpc.listen, ElementsAre("127.0.0.1:50051"));
  EXPECT_EQ(options->metrics_address, "127.0.0.1:9464");
  EXPECT_FALSE(options->model.layers.has_value());
  EXPECT_EQ(options->model.dtype, DType::kF32);
  EXPECT_EQ(options->device.kind, DeviceKind::kAuto);
  EXPECT_FALSE(options->device.tf32);
}

TEST(OptionsTest, EveryFlagReachesItsOption) {
  const auto options = Parse({"--model=m",
                              "--layers=0-15",
                              "--dtype=bf16",
                              "--frozen",
                              "--listen=127.0.0.1:1,unix:/s",
                              "--listen",
                              "0.0.0.0:2",
                              "--insecure-listen-anywhere",
                              "--allow-drain",
                              "--metrics-address=",
                              "--checkpoint-dir=c",
                              "--restore=latest",
                              "--workspace-bytes=256MiB",
                              "--stash-bytes=2GiB",
                              "--memory-bytes=16GiB",
                              "--device=cuda:3",
                              "--tf32",
                              "--max-calls=3",
                              "--max-sessions=4",
                              "--threads=2",
                              "--lease=10s",
                              "--seal-timeout=2m",
                              "--stall-timeout=1500ms",
                              "--drain-timeout=9s",
                              "--log-level=warning",
                              "--log-format=json"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->model.layers, std::make_pair(0, 15));
  EXPECT_EQ(options->model.dtype, DType::kBF16);
  EXPECT_TRUE(options->engine.frozen);
  EXPECT_THAT(options->rpc.listen, ElementsAre("127.0.0.1:1", "unix:/s", "0.0.0.0:2"));
  EXPECT_TRUE(options->rpc.allow_drain);
  EXPECT_EQ(options->metrics_address, "");
  EXPECT_EQ(options->checkpoint_dir, "c");
  EXPECT_EQ(options->restore, "latest");
  EXPECT_EQ(options->engine.workspace_bytes, 256LL << 20);
  EXPECT_EQ(options->engine.stash_bytes, 2LL << 30);
  EXPECT_EQ(options->device.memory_bytes, 16LL << 30);
  EXPECT_EQ(options->engine.max_call_count, 3);
  EXPECT_EQ(options->engine.max_session_count, 4);
  EXPECT_EQ(options->device.threads, 2);
  EXPECT_EQ(options->device.kind, DeviceKind::kCuda);
  EXPECT_EQ(options->device.gpu, 3);
  EXPECT_TRUE(options->device.tf32);
  EXPECT_EQ(options->engine.lease, absl::Seconds(10));
  EXPECT_EQ(options->engine.seal_timeout, absl::Minutes(2));
  EXPECT_EQ(options->rpc.stall_timeout, absl::Milliseconds(1500));
  EXPECT_EQ(options->drain_timeout, absl::Seconds(9));
  EXPECT_EQ(options->log.level, LogLevel::kWarning);
  EXPECT_EQ(options->log.format, LogFormat::kJson);
}

TEST(OptionsTest, ADrainSavesACheckpointWhereOneCanBeSaved) {
  const auto options = Parse({"--model=m", "--checkpoint-dir=c", "--drain-checkpoint=drained"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->drain_checkpoint, "drained");
  EXPECT_EQ(Parse({"--model=m"})->drain_checkpoint, "");
}

TEST(OptionsTest, ReplicasHaveARankACoordinatorAndTimes) {
  const auto options =
      Parse({"--model=m", "--replicas=3", "--rank=2", "--coordinator=host:7", "--on-loss=continue",
             "--sync-host=10.0.0.2", "--replica-start-timeout=1m", "--replica-timeout=3s", "--replica-heartbeat=200ms",
             "--sum-timeout=20s", "--sum-by=nccl", "--insecure-listen-anywhere"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->replicas.size, 3);
  EXPECT_EQ(options->replicas.rank, 2);
  EXPECT_EQ(options->replicas.coordinator, "host:7");
  EXPECT_EQ(options->replicas.on_loss, OnLoss::kContinue);
  EXPECT_EQ(options->replicas.sync_host, "10.0.0.2");
  EXPECT_EQ(options->replicas.start_timeout, absl::Minutes(1));
  EXPECT_EQ(options->replicas.loss_timeout, absl::Seconds(3));
  EXPECT_EQ(options->replicas.heartbeat, absl::Milliseconds(200));
  EXPECT_EQ(options->replicas.sum_timeout, absl::Seconds(20));
  EXPECT_EQ(options->sum_by, SumBy::kNccl);
  EXPECT_EQ(Parse({"--model=m"})->sum_by, SumBy::kAuto);
  EXPECT_EQ(Parse({"--model=m"})->replicas.size, 1);
  EXPECT_EQ(Parse({"--model=m"})->replicas.rank, 0);
}

TEST(OptionsTest, ReplicasThatDoNotFitEachOtherAreRefusedByName) {
  const auto refusal = [](std::vector<const char*> flags) {
    flags.insert(flags.begin(), {"--model=m", "--replicas=2"});
    return Refusal(flags);
  };
  EXPECT_THAT(refusal({"--rank=2", "--coordinator=h:1"}), HasSubstr("--rank=2 is none of --replicas=2"));
  EXPECT_THAT(refusal({"--rank=0"}), HasSubstr("--replicas=2 needs --coordinator"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h"}), HasSubstr("coordinator"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h:1", "--frozen"}), HasSubstr("--replicas=2 and --frozen"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h:1", "--replica-timeout=1s", "--replica-heartbeat=600ms"}),
              HasSubstr("--replica-timeout=1s is below two of --replica-heartbeat=600ms"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h:1", "--lease=10s", "--seal-timeout=20s", "--replica-timeout=20s"}),
              HasSubstr("--seal-timeout=20s is not above --replica-timeout=20s"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h:1", "--sum-by=nccl", "--device=cpu"}),
              HasSubstr("--sum-by=nccl needs a GPU, got --device=cpu"));
  EXPECT_THAT(refusal({"--rank=0", "--coordinator=h:1", "--sum-by=mpi"}), HasSubstr("mpi"));
  EXPECT_THAT(refusal({"--coordinator=h:1"}), HasSubstr("--replicas=2 needs --rank"));
  for (const char* rank : {"--rank=-1", "--rank=-2", "--rank=1024", "--rank=pods", "--rank="}) {
    EXPECT_THAT(refusal({rank}), AllOf(HasSubstr("--rank"), HasSubstr("expected 0 to 1023, or \"pod\""))) << rank;
  }
  EXPECT_THAT(Refusal({"--model=m", "--coordinator=h:1"}), HasSubstr("need --replicas above 1"));
  EXPECT_THAT(Refusal({"--model=m", "--rank=1"}), HasSubstr("need --replicas above 1"));
  EXPECT_THAT(Refusal({"--model=m", "--replicas=0"}), HasSubstr("--replicas: Value 0 not in range 1 to 1024"));
  EXPECT_THAT(Refusal({"--model=m", "--on-loss=hope"}), HasSubstr("--on-loss: hope not in {continue,wait}"));
}

TEST(OptionsTest, ABadValueIsRefusedWithWhatWasExpected) {
  EXPECT_THAT(Refusal({"--model=m", "--layers=5-3"}), HasSubstr("--layers: got \"5-3\", expected the first and"));
  EXPECT_THAT(Refusal({"--model=m", "--layers=0-1-2"}), HasSubstr("--layers"));
  EXPECT_THAT(Refusal({"--model=m", "--layers="}), HasSubstr("--layers: got \"\""));
  EXPECT_THAT(Refusal({"--model=m", "--dtype=f16"}), HasSubstr("--dtype: f16 not in {bf16,f32,f64}"));
  EXPECT_THAT(Refusal({"--model=m", "--workspace-bytes=3XB"}),
              AllOf(HasSubstr("--workspace-bytes: xb unit not recognized. Allowed values: {b,"), HasSubstr("gib")));
  EXPECT_THAT(Refusal({"--model=m", "--workspace-bytes="}), HasSubstr("--workspace-bytes: Input is empty"));
  EXPECT_THAT(Refusal({"--model=m", "--workspace-bytes=x"}), HasSubstr("--workspace-bytes"));
  EXPECT_THAT(Refusal({"--model=m", "--memory-bytes=99999999999GiB"}), HasSubstr("--memory-bytes: 99999999999"));
  EXPECT_THAT(Refusal({"--model=m", "--memory-bytes=-1"}), HasSubstr("--memory-bytes: Value -1 not in range 1 to "));
  EXPECT_THAT(Refusal({"--model=m", "--max-calls=0"}), HasSubstr("--max-calls: Value 0 not in range 1 to 65536"));
  EXPECT_THAT(Refusal({"--model=m", "--threads=many"}), HasSubstr("--threads: Value many not in range"));
  EXPECT_THAT(Refusal({"--model=m", "--lease=30"}), HasSubstr("--lease: got \"30\", expected a time of 1s to 24h"));
  EXPECT_THAT(Refusal({"--model=m", "--drain-timeout=-1s"}), HasSubstr("--drain-timeout: got \"-1s\""));
  EXPECT_THAT(Refusal({"--model=m", "--frozen=yes"}), HasSubstr("--frozen: yes not in {true,false}"));
  EXPECT_THAT(Refusal({"--model=m", "--log-level=loud"}), HasSubstr("--log-level: loud not in {debug,error,info,warn"));
  EXPECT_THAT(Refusal({"--model=m", "--listen="}), HasSubstr("expected host:port"));
}

TEST(OptionsTest, AFileThatIsAskedForIsNamed) {
  for (const std::string flag : {"--token-file", "--tls-cert", "--tls-key", "--tls-client-ca", "--replica-ca"}) {
    EXPECT_THAT(Refusal({"--model=m", (flag + "=").c_str()}), HasSubstr(flag + ": got \"\", expected a file"));
    EXPECT_THAT(Refusal({"--model=m", (flag + "=f").c_str(), flag.c_str(), ""}), HasSubstr(flag + ": got \"\""));
  }
}

TEST(OptionsTest, ANumberOutOfRangeIsRefusedWithTheRange) {
  EXPECT_THAT(Refusal({"--model=m", "--workspace-bytes=9223372036854775807"}),
              HasSubstr("--workspace-bytes: Value 9223372036854775807 not in range 1 to 1125899906842624"));
  EXPECT_THAT(Refusal({"--model=m", "--workspace-bytes=0"}), HasSubstr("--workspace-bytes: Value 0 not in range 1 to"));
  EXPECT_THAT(Refusal({"--model=m", "--memory-bytes=0"}), HasSubstr("--memory-bytes: Value 0 not in range 1 to"));
  EXPECT_THAT(Refusal({"--model=m", "--max-calls=65537"}), HasSubstr("--max-calls: Value 65537 not in range"));
  EXPECT_THAT(Refusal({"--model=m", "--max-sessions=65537"}), HasSubstr("--max-sessions: Value 65537 not in range"));
  EXPECT_THAT(Refusal({"--model=m", "--threads=2147483647"}),
              HasSubstr("--threads: Value 2147483647 not in range 1 to 4096"));
  for (const char* time : {"1ns", "999ms", "0s", "-5s", "25h", "inf", "-inf"}) {
    EXPECT_THAT(Refusal({"--model=m", absl::StrCat("--lease=", time).c_str()}),
                HasSubstr(absl::StrCat("--lease: got \"", time, "\", expected a time of 1s to 24h")));
  }
  for (const char* flag : {"--seal-timeout", "--stall-timeout", "--drain-timeout"}) {
    EXPECT_THAT(Refusal({"--model=m", absl::StrCat(flag, "=99ms").c_str()}),
                HasSubstr(absl::StrCat(flag, ": got \"99ms\", expected a time of 100ms to 24h")));
  }
  EXPECT_TRUE(Parse({"--model=m", "--lease=1s", "--stall-timeout=100ms", "--drain-timeout=24h", "--threads=4096",
                     "--max-calls=65536", "--max-sessions=65536", "--workspace-bytes=1", "--memory-bytes=1"})
                  .ok());
}

TEST(OptionsTest, ReadersAreLeftSomething) {
  for (const char* flag : {"--max-calls=1", "--max-sessions=1"}) {
    EXPECT_THAT(
        Refusal({"--model=m", flag}),
        HasSubstr(absl::StrCat(flag, " leaves readers none, who have half: 2 or more were expected, or --frozen")));
    EXPECT_TRUE(Parse({"--model=m", flag, "--frozen"}).ok());
  }
  EXPECT_TRUE(Parse({"--model=m", "--max-calls=2", "--max-sessions=2"}).ok());
}

TEST(OptionsTest, AFlagThatIsNoneIsNamed) {
  EXPECT_THAT(Refusal({"--model=m", "--max_calls=3"}), HasSubstr("not expected: --max_calls=3; --help lists"));
  EXPECT_THAT(Refusal({"--model"}), HasSubstr("--model: 1 required FOLDER missing"));
  EXPECT_THAT(Refusal({"folder"}), HasSubstr("not expected: folder"));
  EXPECT_THAT(Refusal({"--model=m", "--listen", "127.0.0.1:1", "folder"}), HasSubstr("not expected: folder"));
}

TEST(OptionsTest, TheLastOfAFlagsRepeatsCounts) {
  const auto options = Parse({"--model=first", "--model", "second", "--frozen", "--frozen=false", "--lease=3s",
                              "--lease=20s", "--restore=latest", "--restore="});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->model_path, "second");
  EXPECT_FALSE(options->engine.frozen);
  EXPECT_EQ(options->engine.lease, absl::Seconds(20));
  EXPECT_EQ(options->restore, "");
}

TEST(OptionsTest, ADeviceIsNamedByItsKindAndNumber) {
  const auto device = [](const char* flag) { return Parse({"--model=m", flag}).value().device; };
  EXPECT_EQ(device("--device=cpu").kind, DeviceKind::kCpu);
  EXPECT_EQ(device("--device=auto").kind, DeviceKind::kAuto);
  EXPECT_EQ(device("--device=cuda").kind, DeviceKind::kCuda);
  EXPECT_EQ(device("--device=cuda").gpu, 0);
  for (const char* bad : {"gpu", "cuda:", "cuda:-1", "cuda:x", "cuda1", "CPU", ""}) {
    EXPECT_THAT(Refusal({"--model=m", absl::StrCat("--device=", bad).c_str()}),
                HasSubstr(absl::StrCat("--device: got \"", bad, "\", expected auto, cpu, cuda, or cuda:N")));
  }
}

TEST(OptionsTest, BytesHaveUnits) {
  const auto bytes = [](const char* flag) {
    const auto options = Parse({"--model=m", flag});
    EXPECT_TRUE(options.ok()) << options.status();
    return options.ok() ? options->engine.workspace_bytes : -1;
  };
  EXPECT_EQ(bytes("--workspace-bytes=1048576"), 1 << 20);
  EXPECT_EQ(bytes("--workspace-bytes=512KiB"), 512 << 10);
  EXPECT_EQ(bytes("--workspace-bytes=4GiB"), 4LL << 30);
  EXPECT_EQ(bytes("--workspace-bytes=4GB"), 4'000'000'000);
  EXPECT_EQ(bytes("--workspace-bytes=12B"), 12);
}

TEST(OptionsTest, OptionsThatContradictEachOtherAreBothNamed) {
  EXPECT_THAT(Refusal({}), HasSubstr("--model is missing"));
  EXPECT_THAT(Refusal({"--model=m", "--listen=0.0.0.0:1"}), HasSubstr("--insecure-listen-anywhere"));
  EXPECT_THAT(Refusal({"--model=m", "--metrics-address=0.0.0.0:1"}), HasSubstr("--insecure-listen-anywhere"));
  EXPECT_THAT(Refusal({"--model=m", "--tf32", "--device=cpu"}), HasSubstr("--tf32 needs a GPU, got --device=cpu"));
  EXPECT_THAT(Refusal({"--model=m", "--restore=latest"}), HasSubstr("--restore=latest needs --checkpoint-dir"));
  EXPECT_THAT(Refusal({"--model=m", "--drain-checkpoint=d"}), HasSubstr("--drain-checkpoint=d needs --checkpoint-dir"));
  EXPECT_THAT(Refusal({"--model=m", "--drain-checkpoint=d", "--checkpoint-dir=c", "--frozen"}), HasSubstr("--frozen"));
  EXPECT_THAT(Refusal({"--model=m", "--lease=2m", "--seal-timeout=1m"}),
              HasSubstr("--seal-timeout=1m is below --lease=2m"));
}

TEST(OptionsTest, UsageNamesEveryFlagOnce) {
  const std::string usage = Usage();
  for (const char* flag : {"--model ", "--listen ", "--frozen ", "--drain-timeout TIME", "--log-format json|text"}) {
    const size_t first = usage.find(flag);
    ASSERT_NE(first, std::string::npos) << flag;
    EXPECT_EQ(usage.find(flag, first + 1), std::string::npos) << flag;
  }
}

}  // namespace
}  // namespace shardmlp
