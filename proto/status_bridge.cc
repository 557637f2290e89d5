#include "proto/status_bridge.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::string_view kDomain = "shardmlp";
// The message travels twice, once of them in base64; with the metadata that stays under 8 KiB.
constexpr size_t kMaxMessageBytes = 2000;
constexpr size_t kMaxMetadataBytes = 1000;

// The first `max_bytes` of `text`, ending between two UTF-8 characters.
absl::string_view Prefix(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

std::string CutMessage(absl::string_view message) {
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  return absl::StrCat(Prefix(message, kMaxMessageBytes), "...");
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(Name(ReasonOf(status))));
  info.set_domain(std::string(kDomain));
  size_t metadata_bytes = 0;
  for (const auto& [key, value] : MetadataOf(status)) {
    metadata_bytes += key.size() + value.size();
    if (metadata_bytes > kMaxMetadataBytes) break;
    (*info.mutable_metadata())[key] = value;
  }
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(CutMessage(status.message()));
  details.add_details()->PackFrom(info);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), details.message(), details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  google::rpc::Status details;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      google::rpc::ErrorInfo info;
      if (!detail.UnpackTo(&info) || info.domain() != kDomain) continue;
      const ErrorMetadata metadata(info.metadata().begin(), info.metadata().end());
      return Error(code, ReasonFromName(info.reason()), status.error_message(), metadata);
    }
  }
  return absl::Status(code, status.error_message());
}

}  // namespace shardmlp
