// TLS as gRPC does it, from PEM files: what a server and its clients need of it, and what is wrong with the files.
//
// Functions; thread-safe.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardmlp {

// Names of files.
struct TlsFiles {
  std::string cert = {};  // this end's certificate, then those between it and its CA
  std::string key = {};   // of the certificate
  std::string ca = {};    // certificates of CAs, one of which the other end's certificate must come from
};

// When certificates begin to be valid, and when the first of them ends.
struct Validity {
  absl::Time begin = absl::InfinitePast();
  absl::Time end = absl::InfiniteFuture();
};

// Reads those of the files that are named, and checks that they are what they should be, and that the key is the
// certificate's. Returns the validity of this end's certificates. INVALID_ARGUMENT names the file.
absl::StatusOr<Validity> ReadTlsFiles(const TlsFiles& files);
// INVALID_ARGUMENT, naming `cert` and the time, where `now` is outside of `validity`.
absl::Status CheckValid(const Validity& validity, const std::string& cert, absl::Time now);

// For a server: the files are read again each kTlsReloadInterval, and new connections get what was read last; nothing
// happens to others. With a ca, clients need a certificate. The files must have been checked.
std::shared_ptr<grpc::ServerCredentials> TlsServerCredentials(const TlsFiles& files);
inline constexpr absl::Duration kTlsReloadInterval = absl::Seconds(1);

// For a client, with the files as they are now. The server's certificate must name the host that is called.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(const TlsFiles& files);

}  // namespace shardmlp
