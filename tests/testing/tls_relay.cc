// Speaks TLS by OpenSSL itself, with poll(), on one thread.
#include "tests/testing/tls_relay.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/base/deadline.h"
#include "core/net/handshake.h"

namespace distgrad {
namespace {

// What either end says before TLS.
constexpr size_t kBeforeTls = kHelloBytes + kProofBytes;

// Only a hang takes so long.
Deadline Later() { return Deadline::After(absl::Minutes(2)); }

// Checks nobody's certificate, but asks for it.
SslContext NewContext(const SSL_METHOD* method, const CertificateFiles& files) {
  SslContext context(SSL_CTX_new(method));
  DG_CHECK(context != nullptr &&
           SSL_CTX_use_certificate_chain_file(context.get(), files.cert.c_str()) == 1 &&
           SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) == 1 &&
           SSL_CTX_set_num_tickets(context.get(), 0) == 1);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, [](int, X509_STORE_CTX*) { return 1; });
  return context;
}

}  // namespace

TlsRelay::TlsRelay(uint16_t server_port, const CertificateFiles& files)
    : server_port_(server_port),
      as_server_(NewContext(TLS_server_method(), files)),
      as_client_(NewContext(TLS_client_method(), files)),
      listener_(Socket::Listen("127.0.0.1", 0).value()),
      thread_([this] { Run(); }) {}

TlsRelay::~TlsRelay() {
  shutdown(listener_.fd(), SHUT_RDWR);
  thread_.join();
}

std::string TlsRelay::seen() const {
  absl::MutexLock lock(&mu_);
  return seen_;
}

void TlsRelay::Run() {
  for (;;) {
    std::vector<pollfd> entries = {{listener_.fd(), POLLIN, 0}};
    for (const Connection& connection : connections_) {
      entries.push_back({connection.client.socket.fd(), POLLIN, 0});
      entries.push_back({connection.server.socket.fd(), POLLIN, 0});
    }
    if (poll(entries.data(), entries.size(), -1) < 0) continue;
    if ((entries[0].revents & (POLLHUP | POLLERR)) != 0) return;
    size_t at = 1;
    for (auto it = connections_.begin(); it != connections_.end(); at += 2) {
      const bool stays = (entries[at].revents == 0 || Forward(*it, it->client, it->server)) &&
                         (entries[at + 1].revents == 0 || Forward(*it, it->server, it->client));
      it = stays ? std::next(it) : connections_.erase(it);
    }
    if (entries[0].revents != 0) Accept();
  }
}

TlsRelay::End TlsRelay::NewEnd(Socket socket, SSL_CTX* context) {
  End end;
  end.socket = std::move(socket);
  end.ssl.reset(SSL_new(context));
  end.in = BIO_new(BIO_s_mem());
  end.out = BIO_new(BIO_s_mem());
  DG_CHECK(end.ssl != nullptr && end.in != nullptr && end.out != nullptr);
  SSL_set_bio(end.ssl.get(), end.in, end.out);
  return end;
}

void TlsRelay::Accept() {
  Socket client(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client.valid()) return;
  auto server = Socket::Connect("127.0.0.1", server_port_, Later());
  if (!server.ok()) return;
  Connection connection{NewEnd(std::move(client), as_server_.get()),
                        NewEnd(*std::move(server), as_client_.get())};
  SSL_set_accept_state(connection.client.ssl.get());
  SSL_set_connect_state(connection.server.ssl.get());
  connections_.push_back(std::move(connection));
}

bool TlsRelay::Forward(Connection& connection, End& from, End& to) {
  char bytes[4096];
  const ssize_t n = recv(from.socket.fd(), bytes, sizeof(bytes), 0);
  if (n <= 0) return false;
  absl::string_view rest(bytes, static_cast<size_t>(n));
  if (from.passed < kBeforeTls) {
    const absl::string_view before = rest.substr(0, kBeforeTls - from.passed);
    if (!to.socket.Send(before, Later()).ok()) return false;
    from.passed += before.size();
    rest.remove_prefix(before.size());
  }
  if (connection.client.passed < kBeforeTls || connection.server.passed < kBeforeTls) return true;
  DG_CHECK(rest.empty() || BIO_write(from.in, rest.data(), static_cast<int>(rest.size())) ==
                               static_cast<int>(rest.size()));
  // What has been heard at one end is said at the other.
  return Advance(connection, from, to) && Advance(connection, to, from) &&
         Advance(connection, from, to);
}

bool TlsRelay::Advance(Connection& connection, End& from, End& to) {
  SSL* const ssl = from.ssl.get();
  int result = SSL_do_handshake(ssl);
  if (!connection.inside && SSL_is_init_finished(connection.client.ssl.get()) != 0 &&
      SSL_is_init_finished(connection.server.ssl.get()) != 0) {
    connection.inside = true;
    ++inside_;
  }
  char words[4096];
  while (result == 1) {
    if (!from.waits.empty()) {
      const int size = static_cast<int>(from.waits.size());
      DG_CHECK(SSL_write(ssl, from.waits.data(), size) == size);
      from.waits.clear();
    }
    const int read = SSL_read(ssl, words, sizeof(words));
    if (read <= 0) {
      result = read;
      break;
    }
    const absl::string_view heard(words, static_cast<size_t>(read));
    to.waits += heard;
    absl::MutexLock lock(&mu_);
    seen_ += heard;
  }
  const bool goes_on = SSL_get_error(ssl, result) == SSL_ERROR_WANT_READ;
  ERR_clear_error();
  for (int n = BIO_read(from.out, words, sizeof(words)); n > 0;
       n = BIO_read(from.out, words, sizeof(words))) {
    if (!from.socket.Send({words, static_cast<size_t>(n)}, Later()).ok()) return false;
  }
  return goes_on;
}

}  // namespace distgrad
