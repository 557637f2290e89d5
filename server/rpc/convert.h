// Between the protocol's messages and the engine's types. Conversion from a message validates what the engine's type
// can't express: an unspecified enum, an absent alternative, a layer named twice. Ranges are the engine's to check.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/call.h"
#include "server/engine/engine.h"
#include "server/engine/step_types.h"
#include "server/metrics.h"
#include "server/rpc/drain_request.h"
#include "shardmlp/v1/compute.pb.h"
#include "shardmlp/v1/model.pb.h"
#include "shardmlp/v1/operation.pb.h"
#include "shardmlp/v1/training.pb.h"

namespace shardmlp {

using CallHeader = std::variant<ForwardSpec, BackwardSpec>;

// A serialized ForwardHeader or BackwardHeader. INVALID_ARGUMENT: MALFORMED_MESSAGE, INVALID_DTYPE.
absl::StatusOr<CallHeader> ReadCallHeader(Pass pass, const std::string& body);
// A whole ForwardResponse or BackwardResponse whose alternative is the end.
std::unique_ptr<google::protobuf::MessageLite> MakeCallEnd(Pass pass, const CallSummary& summary);

absl::StatusOr<SessionSpec> FromProto(const v1::OpenSessionRequest& request);
absl::StatusOr<SealSpec> FromProto(const v1::SealStepRequest& request);
absl::StatusOr<CommitSpec> FromProto(const v1::CommitStepRequest& request);
absl::StatusOr<DiscardSpec> FromProto(const v1::DiscardStepRequest& request);

// What a method answers with, from what the engine answers.
void Fill(const StepPosition& position, v1::StepPosition& to);
void Fill(const SessionGrant& grant, v1::OpenSessionResponse& to);
void Fill(const SealResult& result, v1::SealStepResponse& to);
void Fill(const CheckpointInfo& checkpoint, v1::CheckpointInfo& to);
void Fill(const DrainSummary& summary, v1::DrainResponse& to);
void Fill(const MetricFamily& family, v1::MetricFamily& to);
// All but the limits that rpc sets and the checksums.
void Fill(const Engine& engine, v1::GetModelResponse& to);

}  // namespace shardmlp
