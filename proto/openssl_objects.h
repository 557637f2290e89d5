// OpenSSL's objects, owned.
#pragma once

#include <openssl/bio.h>

#include <memory>

namespace shardmlp {

// A deleter that is one of OpenSSL's functions.
template <auto kFree>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};

using Bio = std::unique_ptr<BIO, Freed<BIO_free_all>>;

}  // namespace shardmlp
