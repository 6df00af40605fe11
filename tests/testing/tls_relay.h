// Somebody between the two ends of TCP connections, who has a certificate that both accept.
//
// It passes on the handshake before TLS as it is, which it could not do itself, and is then the
// other end of TLS for both: so it would read and could change all that they say, were TLS not
// bound to that handshake.
#ifndef DISTGRAD_TESTS_TESTING_TLS_RELAY_H_
#define DISTGRAD_TESTS_TESTING_TLS_RELAY_H_

#include <openssl/ssl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/net/certificate_files.h"
#include "core/net/openssl_objects.h"
#include "core/net/socket.h"

namespace distgrad {

class TlsRelay {
 public:
  // Listens on loopback, and goes between who connects and that port there.
  TlsRelay(uint16_t server_port, const CertificateFiles& files);
  ~TlsRelay();
  TlsRelay(const TlsRelay&) = delete;
  TlsRelay& operator=(const TlsRelay&) = delete;

  uint16_t port() const { return listener_.LocalPort().value(); }
  // How many connections it has come into: both ends have taken its certificate.
  int inside() const { return inside_; }
  // What it has read within TLS, both ways.
  std::string seen() const;

 private:
  // One of the two ends that it talks to, and its own end of their TLS.
  struct End {
    Socket socket;
    std::unique_ptr<SSL, OpensslFree<SSL_free>> ssl;
    BIO* in = nullptr;   // of `ssl`
    BIO* out = nullptr;  // of `ssl`
    size_t passed = 0;   // bytes of the handshake before TLS, from there
    std::string waits;   // within TLS, until that is established there
  };
  struct Connection {
    End client, server;
    bool inside = false;
  };

  void Run();
  void Accept();
  // Returns false if the connection is over.
  bool Forward(Connection& connection, End& from, End& to);
  // Goes on with TLS at one end.
  bool Advance(Connection& connection, End& from, End& to);
  static End NewEnd(Socket socket, SSL_CTX* context);

  const uint16_t server_port_;
  const SslContext as_server_, as_client_;
  Socket listener_;
  std::atomic<int> inside_{0};
  mutable absl::Mutex mu_;
  std::string seen_ ABSL_GUARDED_BY(mu_);
  std::list<Connection> connections_;  // on thread_ only
  std::thread thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_TLS_RELAY_H_
