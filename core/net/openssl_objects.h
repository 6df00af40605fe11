// Owners of OpenSSL's objects, and its errors, for the files that use it.
#ifndef DISTGRAD_CORE_NET_OPENSSL_OBJECTS_H_
#define DISTGRAD_CORE_NET_OPENSSL_OBJECTS_H_

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <memory>
#include <string>

namespace distgrad {

template <auto kFree>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};

using SslContext = std::unique_ptr<SSL_CTX, OpensslFree<SSL_CTX_free>>;

// Returns the reason of the first error that this thread has met since the last call.
std::string TakeOpensslError();

// Returns a context for TLS 1.3 alone, with one cipher suite, AES-128-GCM; null if this machine's
// OpenSSL cannot do that.
SslContext NewTls13Context();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_OPENSSL_OBJECTS_H_
