#include "proto/tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "proto/openssl_objects.h"

namespace shardmlp {
namespace {

using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;

absl::Status Invalid(absl::string_view message) {
  ERR_clear_error();  // what OpenSSL found is said here; gRPC must not take it for its own
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Invalid(absl::StrCat("can't read ", path, ": ", std::strerror(errno)));
  return std::string(std::istreambuf_iterator<char>(file), {});
}

Bio Open(const std::string& pem) { return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()))); }

// At least one. `path` is where they are from.
absl::StatusOr<std::vector<Certificate>> ParseCertificates(const std::string& pem, const std::string& path) {
  const Bio bio = Open(pem);
  std::vector<Certificate> certificates;
  while (X509* const certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    certificates.emplace_back(certificate);
  }
  const bool reached_the_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (certificates.empty() || !reached_the_end) return Invalid(absl::StrCat(path, " is not PEM of certificates"));
  ERR_clear_error();
  return certificates;
}

absl::StatusOr<Key> ParseKey(const std::string& pem, const std::string& path) {
  // A key under a password is none: nobody is there to type it.
  const auto no_password = [](char*, int, int, void*) { return -1; };
  Key key(PEM_read_bio_PrivateKey(Open(pem).get(), nullptr, no_password, nullptr));
  if (key == nullptr) return Invalid(absl::StrCat(path, " is not PEM of a private key without a password"));
  return key;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm utc = {};
  ASN1_TIME_to_tm(time, &utc);
  return absl::FromTimeT(timegm(&utc));
}

std::string Text(absl::Time time) { return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone()); }

// What the files hold, and how long their certificates are valid.
struct Contents {
  std::string cert;
  std::string key;
  std::string ca;
  Validity validity;
};

absl::Status ParseOwn(const TlsFiles& files, Contents& contents) {
  SHARDMLP_ASSIGN_OR_RETURN(const auto chain, ParseCertificates(contents.cert, files.cert));
  SHARDMLP_ASSIGN_OR_RETURN(const Key key, ParseKey(contents.key, files.key));
  if (X509_check_private_key(chain.front().get(), key.get()) != 1) {
    return Invalid(absl::StrCat("the key in ", files.key, " is not that of the first certificate in ", files.cert));
  }
  Validity& validity = contents.validity;
  for (const Certificate& certificate : chain) {
    validity.begin = std::max(validity.begin, TimeOf(X509_get0_notBefore(certificate.get())));
    validity.end = std::min(validity.end, TimeOf(X509_get0_notAfter(certificate.get())));
  }
  return absl::OkStatus();
}

absl::StatusOr<Contents> ReadOnce(const TlsFiles& files) {
  Contents contents;
  if (!files.cert.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(contents.cert, ReadFile(files.cert));
    SHARDMLP_ASSIGN_OR_RETURN(contents.key, ReadFile(files.key));
    SHARDMLP_RETURN_IF_ERROR(ParseOwn(files, contents));
  }
  if (!files.ca.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(contents.ca, ReadFile(files.ca));
    SHARDMLP_RETURN_IF_ERROR(ParseCertificates(contents.ca, files.ca).status());
  }
  return contents;
}

// They may have been replaced between one and the next, and then fit the second time.
absl::StatusOr<Contents> Read(const TlsFiles& files) {
  absl::StatusOr<Contents> contents = ReadOnce(files);
  return contents.ok() ? contents : ReadOnce(files);
}

}  // namespace

absl::StatusOr<Validity> ReadTlsFiles(const TlsFiles& files) {
  SHARDMLP_ASSIGN_OR_RETURN(const Contents contents, Read(files));
  return contents.validity;
}

absl::Status CheckValid(const Validity& validity, const std::string& cert, absl::Time now) {
  if (now > validity.end) return Invalid(absl::StrCat("the certificate in ", cert, " expired at ", Text(validity.end)));
  if (now >= validity.begin) return absl::OkStatus();
  return Invalid(absl::StrCat("the certificate in ", cert, " is valid from ", Text(validity.begin), " on alone"));
}

std::shared_ptr<grpc::ServerCredentials> TlsServerCredentials(const TlsFiles& files) {
  const auto interval = static_cast<unsigned>(absl::ToInt64Seconds(kTlsReloadInterval));
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.cert, files.ca, interval));
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(const TlsFiles& files) {
  SHARDMLP_ASSIGN_OR_RETURN(const Contents contents, Read(files));
  return grpc::SslCredentials(
      {.pem_root_certs = contents.ca, .pem_private_key = contents.key, .pem_cert_chain = contents.cert});
}

}  // namespace shardmlp
