// Statuses over gRPC and back.
#include "proto/status_bridge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

TEST(StatusBridgeTest, OkIsOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(StatusBridgeTest, AnyClientOfGoogleRpcStatusCanReadIt) {
  const grpc::Status status = ToGrpcStatus(Error(absl::StatusCode::kAborted, Reason::kStepAborted,
                                                 "rank 1 left the step", {{"rank", "1"}, {"attempt", "2"}}));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(status.error_message(), "rank 1 left the step");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 10);
  EXPECT_EQ(details.message(), "rank 1 left the step");
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "STEP_ABORTED");
  EXPECT_EQ(info.domain(), "shardmlp");
  EXPECT_EQ(info.metadata().at("rank"), "1");
  EXPECT_EQ(info.metadata().at("attempt"), "2");
}

TEST(StatusBridgeTest, EveryReasonComesBack) {
  for (int i = 0; i <= static_cast<int>(Reason::kUnreachable); ++i) {
    const auto reason = static_cast<Reason>(i);
    const absl::Status sent = Error(absl::StatusCode::kInternal, reason, "message", {{"key", "value"}});
    const absl::Status back = FromGrpcStatus(ToGrpcStatus(sent));
    EXPECT_EQ(back.code(), sent.code());
    EXPECT_EQ(back.message(), sent.message());
    EXPECT_EQ(ReasonOf(back), reason) << std::string(Name(reason));
    EXPECT_THAT(MetadataOf(back), testing::ElementsAre(std::make_pair("key", "value")));
  }
}

TEST(StatusBridgeTest, AStatusFromElsewhereKeepsCodeAndMessage) {
  const absl::Status plain = FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection refused"));
  EXPECT_EQ(plain.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(plain.message(), "connection refused");
  EXPECT_EQ(ReasonOf(plain), Reason::kUnspecified);

  google::rpc::ErrorInfo info;
  info.set_reason("STALE_WEIGHTS");
  info.set_domain("elsewhere.example");
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  for (const std::string& bytes : {details.SerializeAsString(), std::string("no such message")}) {
    const absl::Status foreign = FromGrpcStatus(grpc::Status(grpc::StatusCode::NOT_FOUND, "gone", bytes));
    EXPECT_EQ(foreign.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(ReasonOf(foreign), Reason::kUnspecified);
  }
}

TEST(StatusBridgeTest, WhatDoesNotFitIntoTrailingMetadataIsCut) {
  // "é" is two bytes, so that some cut would fall into one.
  for (const int offset : {0, 1}) {
    std::string message(offset, 'x');
    while (message.size() < 20000) message += "é";
    ErrorMetadata metadata;
    for (int i = 0; i < 1000; ++i) metadata.emplace_back("key" + std::to_string(i), "value");
    const grpc::Status status =
        ToGrpcStatus(Error(absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch, message, metadata));
    // grpc-message may take three bytes for each, and details take four for three.
    EXPECT_LT(status.error_message().size() * 3 + status.error_details().size() * 4 / 3, 12000u);
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_EQ(ReasonOf(FromGrpcStatus(status)), Reason::kRowCountMismatch);
    EXPECT_THAT(status.error_message(), testing::EndsWith("é..."));
  }
}

}  // namespace
}  // namespace shardmlp
