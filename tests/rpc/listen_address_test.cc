// Which addresses a server takes: loopback by itself, others only on demand, nonsense never.
#include "server/rpc/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardmlp {
namespace {

TEST(ListenAddressTest, LoopbackAndUnixSocketsNeedNoLeave) {
  for (const char* address : {"127.0.0.1:50051", "127.8.8.8:1", "localhost:0", "[::1]:65535", "unix:/run/shardmlp.sock",
                              "unix:relative.sock", "unix-abstract:shardmlp"}) {
    EXPECT_TRUE(CheckListenAddress(address, /*anywhere=*/false).ok()) << address;
  }
}

TEST(ListenAddressTest, OtherHostsNeedLeaveAndAreToldHow) {
  for (const char* address : {"0.0.0.0:50051", "[::]:50051", "10.0.0.7:50051", "trainer:50051", "1127.0.0.1:1"}) {
    const absl::Status status = CheckListenAddress(address, /*anywhere=*/false);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("--insecure-listen-anywhere"));
    EXPECT_TRUE(CheckListenAddress(address, /*anywhere=*/true).ok()) << address;
  }
}

TEST(ListenAddressTest, WhatIsNoAddressIsRefusedEvenWithLeave) {
  for (const char* address : {"", "50051", ":50051", "127.0.0.1", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:65536",
                              "127.0.0.1:-1", "127.evil.example:80x"}) {
    EXPECT_FALSE(CheckListenAddress(address, /*anywhere=*/true).ok()) << address;
  }
}

TEST(ListenAddressTest, NamesThatOnlyLookLikeLoopbackAreOthers) {
  EXPECT_FALSE(CheckListenAddress("127.evil.example:80", /*anywhere=*/false).ok());
  EXPECT_FALSE(CheckListenAddress("127.0.0.1.example:80", /*anywhere=*/false).ok());
}

TEST(ListenAddressTest, TheBoundPortTakesZerosPlace) {
  EXPECT_EQ(WithBoundPort("127.0.0.1:0", 1234), "127.0.0.1:1234");
  EXPECT_EQ(WithBoundPort("[::1]:0", 1234), "[::1]:1234");
  EXPECT_EQ(WithBoundPort("unix:/a:0", 1), "unix:/a:0");
}

}  // namespace
}  // namespace shardmlp
