// The services that a server has, as health and probes name them.
#pragma once

#include <array>

#include "shardmlp/v1/compute.grpc.pb.h"
#include "shardmlp/v1/model.grpc.pb.h"
#include "shardmlp/v1/operation.grpc.pb.h"
#include "shardmlp/v1/training.grpc.pb.h"

namespace shardmlp {

inline constexpr std::array<const char*, 4> kServiceNames = {
    v1::Compute::service_full_name(), v1::Training::service_full_name(), v1::Model::service_full_name(),
    v1::Operation::service_full_name()};

}  // namespace shardmlp
