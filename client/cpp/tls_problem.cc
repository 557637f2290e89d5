#include "client/cpp/tls_problem.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/openssl_objects.h"

namespace shardmlp {
namespace {

using Context = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using Tls = std::unique_ptr<SSL, Freed<SSL_free>>;

constexpr unsigned char kAlpn[] = {2, 'h', '2'};
constexpr int kNapMilliseconds = 10;

// Of the last that failed, which is forgotten.
std::string TakeReason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "the connection was closed" : reason;
}

// OpenSSL writes to sockets that may be closed, and the signal that this raises ends a process which does not expect
// it.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec now = {};
    while (sigismember(&before_, SIGPIPE) == 0 && sigtimedwait(&sigpipe_, nullptr, &now) == SIGPIPE) continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t sigpipe_;
  sigset_t before_;
};

// A connected TCP socket, or null. Its reads and writes end after `timeout` too.
Bio Connect(const std::string& target, absl::Duration timeout) {
  Bio bio(BIO_new_connect(target.c_str()));
  const auto seconds = static_cast<int>(std::max<int64_t>(absl::ToInt64Seconds(timeout), 1));
  if (bio == nullptr || BIO_do_connect_retry(bio.get(), seconds, kNapMilliseconds) != 1) {
    ERR_clear_error();
    return nullptr;
  }
  const int fd = static_cast<int>(BIO_get_fd(bio.get(), nullptr));
  BIO_socket_nbio(fd, 0);
  const timeval wait = absl::ToTimeval(timeout);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
  return bio;
}

// `wanted` is set when the server asks for a certificate.
Context MakeContext(const ClientCredentials& files, bool& wanted) {
  Context context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // goes on, and tells the result
  SSL_CTX_set_alpn_protos(context.get(), kAlpn, sizeof(kAlpn));
  const auto note = [](SSL*, void* flag) { return static_cast<int>(*static_cast<bool*>(flag) = true); };
  SSL_CTX_set_cert_cb(context.get(), note, &wanted);
  if (!files.ca_file.empty()) SSL_CTX_load_verify_file(context.get(), files.ca_file.c_str());
  if (!files.cert_file.empty()) {
    SSL_CTX_use_certificate_chain_file(context.get(), files.cert_file.c_str());
    SSL_CTX_use_PrivateKey_file(context.get(), files.key_file.c_str(), SSL_FILETYPE_PEM);
  }
  return context;
}

void ExpectHost(SSL* tls, const std::string& host) {
  X509_VERIFY_PARAM* const expected = SSL_get0_param(tls);
  if (X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str()) != 1) SSL_set1_host(tls, host.c_str());
  ERR_clear_error();
  SSL_set_tlsext_host_name(tls, host.c_str());
}

// "host" of "host:port" and "[host]:port".
std::string HostOf(const std::string& target) {
  const std::string host = target.substr(0, target.rfind(':'));
  return host.size() > 2 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

std::string IssuerOf(const X509* certificate) {
  std::string issuer(256, '\0');
  X509_NAME_oneline(X509_get_issuer_name(certificate), issuer.data(), static_cast<int>(issuer.size()));
  return issuer.c_str();
}

// After a handshake in which our certificate, or none, was sent, and not looked at yet. gRPC's server says nothing and
// hangs up on one that it does not take.
std::string AwaitServersWord(SSL* tls, const ClientCredentials& files) {
  char first = 0;
  const int read = SSL_read(tls, &first, 1);
  if (read == 1 || SSL_get_error(tls, read) == SSL_ERROR_WANT_READ) return "";
  const std::string reason = TakeReason();
  const X509* const own = SSL_get_certificate(tls);
  if (own == nullptr) return "the server wants a certificate, and none is given";
  if (X509_cmp_current_time(X509_get0_notAfter(own)) < 0) {
    return absl::StrCat("our certificate in ", files.cert_file, " has expired");
  }
  return absl::StrCat("the server does not take our certificate in ", files.cert_file, ", which comes from ",
                      IssuerOf(own), ": ", reason);
}

}  // namespace

std::string TlsProblem(const std::string& target, const ClientCredentials& credentials, absl::Duration timeout) {
  if (absl::StrContains(target, "unix") || !absl::StrContains(target, ':')) return "";
  const WithoutSigpipe without_sigpipe;
  const Bio bio = Connect(target, timeout);
  if (bio == nullptr) return "";
  ERR_clear_error();
  bool wanted = false;
  const Context context = MakeContext(credentials, wanted);
  const Tls tls(SSL_new(context.get()));
  BIO_up_ref(bio.get());
  SSL_set_bio(tls.get(), bio.get(), bio.get());
  const std::string host = credentials.server_name.empty() ? HostOf(target) : credentials.server_name;
  ExpectHost(tls.get(), host);
  const int shaken = SSL_connect(tls.get());
  if (credentials.ca_file.empty()) {
    ERR_clear_error();
    return shaken == 1 ? "the server speaks TLS, and no CA is given to know it by" : "";
  }
  if (shaken != 1 && SSL_get_error(tls.get(), shaken) != SSL_ERROR_SSL) return "";  // it stands still
  if (shaken != 1) return absl::StrCat("the server does not shake hands as TLS does: ", TakeReason());
  if (const long result = SSL_get_verify_result(tls.get()); result != X509_V_OK) {
    ERR_clear_error();
    return absl::StrCat("the server's certificate, for ", host, " and a CA in ", credentials.ca_file, ": ",
                        X509_verify_cert_error_string(result));
  }
  return wanted ? AwaitServersWord(tls.get(), credentials) : "";
}

}  // namespace shardmlp
