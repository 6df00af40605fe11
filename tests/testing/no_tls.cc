// Stands before libssl's SSL_new(), and passes calls on to it while sessions may be made.
#include "tests/testing/no_tls.h"

#include <dlfcn.h>
#include <openssl/ssl.h>

#include <atomic>

namespace {

std::atomic<bool> refuses{false};

}  // namespace

extern "C" SSL* SSL_new(SSL_CTX* ctx) {
  if (refuses) return nullptr;
  static auto* const real = reinterpret_cast<SSL* (*)(SSL_CTX*)>(dlsym(RTLD_NEXT, "SSL_new"));
  return real(ctx);
}

namespace distgrad {

NoTls::NoTls() { refuses = true; }
NoTls::~NoTls() { refuses = false; }

}  // namespace distgrad
