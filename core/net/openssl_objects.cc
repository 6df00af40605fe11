// Makes contexts of TLS as all connections of distgrad want them, and says what OpenSSL lacks.
#include "core/net/openssl_objects.h"

#include "core/base/descriptors.h"

namespace distgrad {
namespace {

// The one cipher suite: what processors compute fastest, and whose hash is that of the secret.
constexpr char kCipherSuites[] = "TLS_AES_128_GCM_SHA256";

}  // namespace

std::string TakeOpensslError() {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  // Of those the library has no text.
  if (ERR_SYSTEM_ERROR(error)) return ErrnoText(ERR_GET_REASON(error));
  const char* const reason = ERR_reason_error_string(error);
  return reason != nullptr ? reason : "the library gives no reason";
}

SslContext NewTls13Context() {
  ERR_clear_error();
  SslContext context(SSL_CTX_new(TLS_method()));
  if (context == nullptr || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), kCipherSuites) != 1 ||
      SSL_CTX_set_num_tickets(context.get(), 0) != 1) {
    return nullptr;
  }
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS);
  return context;
}

}  // namespace distgrad
