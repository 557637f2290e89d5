// The client's plain types as the protocol's, and back.
#pragma once

#include "absl/status/statusor.h"
#include "client/cpp/served_metrics.h"
#include "client/cpp/served_model.h"
#include "client/cpp/session.h"
#include "kernels/matrix.h"
#include "proto/dtype.h"
#include "shardmlp/v1/compute.pb.h"
#include "shardmlp/v1/model.pb.h"
#include "shardmlp/v1/operation.pb.h"
#include "shardmlp/v1/training.pb.h"

namespace shardmlp {

v1::CommitStepRequest ToProto(const CommitOptions& options);

ClientPosition FromProto(const v1::StepPosition& position);
ClientCheckpoint FromProto(const v1::CheckpointInfo& checkpoint);
ClientDrain FromProto(const v1::DrainResponse& response);
std::vector<ClientSeries> FromProto(const v1::GetMetricsResponse& response);
// INTERNAL also for limits that nothing can be sent within.
absl::StatusOr<ServedModel> FromProto(const v1::GetModelResponse& response);

}  // namespace shardmlp
