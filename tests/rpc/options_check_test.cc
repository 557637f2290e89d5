// Flags that do not go together: all of them are named, and so is what clients would have to be told.
#include "server/options_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

ServerOptions Parsed(std::vector<const char*> flags) {
  flags.push_back("--model=m");
  const auto options = ParseOptions(flags);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? *options : ServerOptions();
}

std::string Refusal(std::vector<const char*> flags) {
  flags.push_back("--model=m");
  const auto options = ParseOptions(flags);
  EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(options.status().message());
}

TEST(OptionsCheckTest, TheDefaultsGoTogether) {
  EXPECT_THAT(Contradictions(Parsed({})), IsEmpty());
  EXPECT_THAT(Warnings(Parsed({})), IsEmpty());
  EXPECT_THAT(Warnings(Parsed({"--replicas=2", "--rank=0", "--coordinator=127.0.0.1:7"})), IsEmpty());
}

TEST(OptionsCheckTest, AllThatContradictsIsNamedAtOnce) {
  ServerOptions options = Parsed({"--replicas=2", "--rank=0", "--coordinator=127.0.0.1:1"});
  options.engine.lease = absl::Minutes(7);
  options.replicas.loss_timeout = absl::Minutes(11);
  options.replicas.heartbeat = absl::Minutes(6);
  options.restore = "latest";
  EXPECT_THAT(Contradictions(options),
              ElementsAre("--restore=latest needs --checkpoint-dir", "--seal-timeout=5m is below --lease=7m",
                          "--replica-timeout=11m is below two of --replica-heartbeat=6m",
                          "--seal-timeout=5m is not above --replica-timeout=11m",
                          "--sum-timeout=1m is not above --replica-timeout=11m",
                          "--replica-start-timeout=10m is not above --replica-timeout=11m"));
  EXPECT_THAT(Refusal({"--lease=7m", "--restore=latest"}),
              HasSubstr("--restore=latest needs --checkpoint-dir; --seal-timeout=5m is below --lease=7m"));
}

TEST(OptionsCheckTest, CertificateAndKeyGoTogether) {
  EXPECT_THAT(Refusal({"--tls-cert=c"}), HasSubstr("--tls-cert=c needs --tls-key"));
  EXPECT_THAT(Refusal({"--tls-key=k"}), HasSubstr("--tls-key=k needs --tls-cert"));
  EXPECT_THAT(Refusal({"--tls-client-ca=a"}), HasSubstr("--tls-client-ca=a needs --tls-cert and --tls-key"));
  EXPECT_THAT(Refusal({"--replicas=2", "--rank=0", "--coordinator=h:1", "--replica-ca=a"}),
              HasSubstr("--replica-ca=a needs --tls-cert and --tls-key"));
  EXPECT_THAT(Refusal({"--tls-cert=c", "--tls-key=k", "--replica-ca=a"}),
              HasSubstr("--replica-ca needs --replicas above 1"));
  EXPECT_THAT(Refusal({"--tls-cert=c", "--tls-key=k", "--listen=unix:/s"}),
              HasSubstr("--tls-cert=c and no --listen but Unix sockets"));
}

TEST(OptionsCheckTest, TheFilesReachTheirOptions) {
  const ServerOptions options =
      Parsed({"--tls-cert=c", "--tls-key=k", "--tls-client-ca=a", "--token-file=t", "--health-listen=0.0.0.0:8",
              "--replicas=2", "--rank=0", "--coordinator=h:1", "--replica-ca=r", "--check-config"});
  EXPECT_EQ(options.rpc.tls.cert, "c");
  EXPECT_EQ(options.rpc.tls.key, "k");
  EXPECT_EQ(options.rpc.tls.ca, "a");
  EXPECT_EQ(options.rpc.token_file, "t");
  EXPECT_EQ(options.rpc.health_listen, "0.0.0.0:8");
  EXPECT_EQ(options.replicas.tls.cert, "c");
  EXPECT_EQ(options.replicas.tls.key, "k");
  EXPECT_EQ(options.replicas.tls.ca, "r");
  EXPECT_TRUE(options.check_config);
}

TEST(OptionsCheckTest, OtherMachinesNeedTlsAndToSayWhoTheyAre) {
  const std::vector<std::vector<const char*>> too_little = {{}, {"--token-file=t"}, {"--tls-cert=c", "--tls-key=k"}};
  for (std::vector<const char*> flags : too_little) {
    flags.push_back("--listen=0.0.0.0:1");
    EXPECT_THAT(Refusal(flags), HasSubstr("Give --tls-cert and --tls-key, with --tls-client-ca or --token-file"));
    flags.push_back("--insecure-listen-anywhere");
    const std::string lacks = flags.size() == 4 ? "asks nobody who they are" : "has no TLS";
    EXPECT_THAT(Warnings(Parsed(flags)),
                ElementsAre(AllOf(HasSubstr("INSECURE: --listen=0.0.0.0:1"), HasSubstr(lacks))));
  }
  for (const char* who : {"--token-file=t", "--tls-client-ca=a"}) {
    EXPECT_THAT(
        Warnings(Parsed({"--listen=0.0.0.0:1", "--metrics-address=0.0.0.0:2", "--tls-cert=c", "--tls-key=k", who})),
        IsEmpty());
  }
  EXPECT_THAT(Refusal({"--metrics-address=0.0.0.0:2"}), HasSubstr("0.0.0.0:2"));
  EXPECT_THAT(Refusal({"--health-listen=8"}), HasSubstr("expected host:port"));
}

TEST(OptionsCheckTest, ReplicasOnANetworkAreWarnedOfWhatIsPlaintext) {
  const std::vector<const char*> flags = {"--replicas=2", "--rank=0", "--coordinator=host0:7"};
  std::vector<const char*> open = flags;
  open.push_back("--insecure-listen-anywhere");
  EXPECT_THAT(Warnings(Parsed(open)), ElementsAre(HasSubstr("sum gradients and hand over weights in plaintext"),
                                                  HasSubstr("--coordinator=host0:7 has no --replica-ca")));
  std::vector<const char*> tls = flags;
  tls.insert(tls.end(), {"--tls-cert=c", "--tls-key=k", "--replica-ca=a"});
  EXPECT_THAT(Warnings(Parsed(tls)), ElementsAre(HasSubstr("in plaintext")));
}

TEST(OptionsCheckTest, StrangersDoNotJoinAsReplicas) {
  const std::vector<const char*> identity = {"--tls-cert=c", "--tls-key=k", "--tls-client-ca=a", "--token-file=t"};
  for (const int rank : {0, 1}) {
    const std::string rank_flag = absl::StrCat("--rank=", rank);
    const auto flags = [&](const char* coordinator, std::vector<const char*> more) {
      more.insert(more.end(), {"--replicas=2", rank_flag.c_str(), coordinator});
      return more;
    };
    for (const auto& open :
         {flags("--coordinator=host0:7", {}), flags("--coordinator=host0:7", identity),
          flags("--coordinator=127.0.0.1:7", identity), flags("--coordinator=127.0.0.1:7", {"--token-file=t"})}) {
      EXPECT_THAT(Refusal(open), AllOf(HasSubstr("has no --replica-ca: whoever reaches it could join as a replica"),
                                       HasSubstr("--insecure-listen-anywhere")));
      std::vector<const char*> said = open;
      said.push_back("--insecure-listen-anywhere");
      EXPECT_THAT(Warnings(Parsed(said)), Contains(HasSubstr("can join as a replica and replace all weights")));
      std::vector<const char*> known = open;
      known.insert(known.end(), {"--replica-ca=r", "--tls-cert=c", "--tls-key=k"});
      EXPECT_THAT(Warnings(Parsed(known)), testing::Not(Contains(HasSubstr("can join as a replica"))));
    }
  }
}

TEST(OptionsCheckTest, NamesOfCheckpointsAreLookedAtBeforeTheyAreNeeded) {
  EXPECT_THAT(Refusal({"--checkpoint-dir=c", "--drain-checkpoint=a/b"}),
              HasSubstr("--drain-checkpoint: checkpoint name \"a/b\""));
  EXPECT_THAT(Refusal({"--checkpoint-dir=c", "--restore=../c"}), HasSubstr("--restore: checkpoint name \"../c\""));
  EXPECT_THAT(Contradictions(Parsed({"--checkpoint-dir=c", "--drain-checkpoint=drain-1", "--restore=latest"})),
              IsEmpty());
}

TEST(OptionsCheckTest, WhoMayEndTheServerIsAWarningWhereThatIsAnybody) {
  EXPECT_FALSE(Parsed({}).rpc.allow_drain);
  EXPECT_THAT(Warnings(Parsed({"--allow-drain", "--listen=127.0.0.1:7,unix:/s"})), IsEmpty());
  EXPECT_THAT(Warnings(Parsed({"--allow-drain", "--listen=0.0.0.0:7", "--insecure-listen-anywhere"})),
              Contains(HasSubstr("INSECURE: --allow-drain")));
  EXPECT_THAT(
      Warnings(Parsed({"--allow-drain", "--listen=0.0.0.0:7", "--tls-cert=c", "--tls-key=k", "--token-file=t"})),
      IsEmpty());
}

TEST(OptionsCheckTest, OnePortIsGivenOnce) {
  EXPECT_THAT(Refusal({"--listen=127.0.0.1:7", "--metrics-address=127.0.0.1:7"}),
              HasSubstr("--listen=127.0.0.1:7 and --metrics-address=127.0.0.1:7 are one port"));
  EXPECT_THAT(Refusal({"--health-listen=0.0.0.0:9464"}),
              HasSubstr("--metrics-address=127.0.0.1:9464 and --health-listen=0.0.0.0:9464 are one port"));
  EXPECT_THAT(Refusal({"--replicas=2", "--rank=0", "--coordinator=h:9", "--health-listen=0.0.0.0:9"}),
              HasSubstr("--health-listen=0.0.0.0:9 and --coordinator=h:9 are one port"));
  EXPECT_THAT(Refusal({"--listen=unix:/s,unix:/s"}), HasSubstr("are one port"));
  for (const std::vector<const char*>& apart :
       std::vector<std::vector<const char*>>{{"--listen=127.0.0.1:0,127.0.0.1:0", "--metrics-address=127.0.0.1:0"},
                                             {"--listen=127.0.0.1:7", "--health-listen=127.0.0.2:7"},
                                             {"--replicas=2", "--rank=1", "--coordinator=h:9",
                                              "--health-listen=0.0.0.0:9", "--insecure-listen-anywhere"}}) {
    EXPECT_THAT(Contradictions(Parsed(apart)), IsEmpty());
  }
}

TEST(OptionsCheckTest, PartsOfTheMemoryAreNotMoreThanAllOfIt) {
  EXPECT_THAT(Refusal({"--stash-bytes=2GiB", "--memory-bytes=1GiB"}),
              HasSubstr("--stash-bytes=2147483648 is above --memory-bytes=1073741824"));
  EXPECT_THAT(Refusal({"--workspace-bytes=2GiB", "--memory-bytes=1GiB"}), HasSubstr("--workspace-bytes=2147483648 is"));
}

TEST(OptionsCheckTest, WhatClientsWouldHaveToBeToldIsAWarning) {
  const auto warnings = [](std::vector<const char*> flags) { return Warnings(Parsed(std::move(flags))); };
  EXPECT_THAT(warnings({"--seal-timeout=10m"}),
              ElementsAre(HasSubstr("--seal-timeout=10m is not below a client's seal time-out, 10m")));
  EXPECT_THAT(warnings({"--stall-timeout=2m"}),
              ElementsAre(HasSubstr("--stall-timeout=2m is not below a client's stall time-out, 2m")));
  EXPECT_THAT(warnings({"--drain-timeout=1m"}),
              ElementsAre(HasSubstr("--drain-timeout=1m is not below a client's retry budget, 1m")));
  EXPECT_THAT(warnings({"--lease=29s"}), ElementsAre(HasSubstr("--lease=29s is below the 30s")));
  EXPECT_THAT(
      warnings({"--replicas=2", "--rank=0", "--coordinator=127.0.0.1:7", "--replica-timeout=1m", "--sum-timeout=2m"}),
      ElementsAre(HasSubstr("--replica-timeout=1m is not below a client's retry budget")));
}

TEST(OptionsCheckTest, ARowFitsIntoAMessage) {
  ModelSpec model;
  model.layers.push_back({.layer = 3, .module = "m", .mlp = {}});
  model.layers.back().mlp.hidden_size = model.layers.back().mlp.output_size = 1000;
  EXPECT_TRUE(CheckMessages(model, {.max_message_bytes = 8064}).ok());
  const absl::Status status = CheckMessages(model, {.max_message_bytes = 8063});
  EXPECT_THAT(std::string(status.message()), HasSubstr("a row of layer 3 takes 8000 bytes"));
}

TEST(OptionsCheckTest, EachFileThatIsWrongIsNamed) {
  ServerOptions options = Parsed({"--tls-cert=/nowhere/c", "--tls-key=/nowhere/k", "--token-file=/nowhere/t"});
  EXPECT_THAT(CheckFiles(options), AllOf(SizeIs(3), Contains(HasSubstr("/nowhere/c: No such file")),
                                         Contains(HasSubstr("/nowhere/t: No such file")), Contains(HasSubstr("m"))));
}

TEST(OptionsCheckTest, WhereTheDrainCouldNotSaveIsNamed) {
  const std::string file = testing::TempDir() + "/shardmlp-no-folder";
  std::ofstream(file) << "a file";
  ServerOptions options = Parsed({"--drain-checkpoint=drain", "--checkpoint-dir", file.c_str()});
  EXPECT_THAT(CheckFiles(options), Contains(AllOf(HasSubstr("--drain-checkpoint"), HasSubstr(file))));
  options.checkpoint_dir = testing::TempDir();
  options.drain_checkpoint = "shardmlp-no-folder";
  EXPECT_THAT(CheckFiles(options), Contains(HasSubstr("shardmlp-no-folder is no checkpoint")));
}

TEST(OptionsCheckTest, ACheckOfAllLeavesWhatContradictsToWhoLooksAtFilesToo) {
  const ServerOptions options = Parsed({"--check-config", "--lease=7m", "--token-file=/nowhere/t"});
  EXPECT_THAT(Contradictions(options), ElementsAre(HasSubstr("--lease=7m")));
  EXPECT_THAT(CheckFiles(options), Contains(HasSubstr("/nowhere/t")));
}

}  // namespace
}  // namespace shardmlp
