// Speaks TLS by OpenSSL itself, not by the code that is tested: these clients check nothing.
#include "tests/testing/certificate_strangers.h"

#include <openssl/bio.h>
#include <openssl/ssl.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/base/deadline.h"
#include "core/net/openssl_objects.h"

namespace distgrad {
namespace {

using Ssl = std::unique_ptr<SSL, OpensslFree<SSL_free>>;

// Only a hang takes so long.
Deadline Later() { return Deadline::After(absl::Minutes(2)); }

Socket ConnectTo(uint16_t port) { return Socket::Connect("127.0.0.1", port, Later()).value(); }

// Whether a server goes on with a client that says that it has certificates, or not.
bool ShakeHands(Socket& socket, const Token& token, bool certificates) {
  Handshake handshake =
      Handshake::Create(Handshake::Role::kClient, "", token, certificates).value();
  std::string bytes;
  while (!handshake.done()) {
    if (!socket.Send(handshake.TakeOutput(), Later()).ok()) return false;
    bytes.resize(handshake.wanted());
    if (!socket.Receive(bytes.data(), bytes.size(), Later()).ok()) return false;
    if (!handshake.Receive(bytes).ok()) return false;
  }
  return true;
}

// Reads until the other end closes, as it has to.
void AwaitEnd(Socket& socket) {
  char byte;
  absl::Status status;
  while (status.ok()) status = socket.Receive(&byte, 1, Later());
  DG_CHECK(absl::IsUnavailable(status));
}

// Whether the server says anything inside of TLS: it welcomes those whom it lets in.
bool SpeaksTls(Socket& socket, SSL_CTX* context) {
  const Ssl ssl(SSL_new(context));
  BIO* const in = BIO_new(BIO_s_mem());
  BIO* const out = BIO_new(BIO_s_mem());
  DG_CHECK(ssl != nullptr && in != nullptr && out != nullptr);
  SSL_set_bio(ssl.get(), in, out);
  SSL_set_connect_state(ssl.get());
  for (;;) {
    char word;
    const int read = SSL_read(ssl.get(), &word, 1);
    if (read == 1) return true;
    char bytes[4096];
    for (int n = BIO_read(out, bytes, sizeof(bytes)); n > 0;
         n = BIO_read(out, bytes, sizeof(bytes))) {
      // A server that has closed does not take it.
      socket.Send({bytes, static_cast<size_t>(n)}, Later()).IgnoreError();
    }
    const bool waits = SSL_get_error(ssl.get(), read) == SSL_ERROR_WANT_READ;
    ERR_clear_error();
    if (!waits || !socket.Receive(bytes, 1, Later()).ok()) break;
    DG_CHECK(BIO_write(in, bytes, 1) == 1);
  }
  AwaitEnd(socket);
  return false;
}

SslContext ContextOf(const CertificateFiles& files, int most = TLS1_3_VERSION) {
  SslContext context(SSL_CTX_new(TLS_client_method()));
  DG_CHECK(context != nullptr && SSL_CTX_set_max_proto_version(context.get(), most) == 1);
  if (files.cert.empty()) return context;
  DG_CHECK(SSL_CTX_use_certificate_chain_file(context.get(), files.cert.c_str()) == 1 &&
           SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) == 1);
  return context;
}

// Returns `who` if the server lets it in.
std::string Try(absl::string_view who, const CertificateFiles& files, int most, uint16_t port,
                const Token& token) {
  Socket socket = ConnectTo(port);
  DG_CHECK(ShakeHands(socket, token, true));
  return SpeaksTls(socket, ContextOf(files, most).get()) ? absl::StrCat(who, "; ") : "";
}

}  // namespace

CertificateStrangers::CertificateStrangers(TestAuthority& ours, const std::string& folder)
    : strange_(TestAuthority(folder).Issue("strange", {.names = "DNS:job"})),
      unnamed_(ours.Issue("unnamed", {.names = "DNS:another"})),
      expired_(ours.Issue("expired", {.names = "DNS:job", .days = -1})),
      server_(ours.Issue("for_servers", {.names = "DNS:job", .use = "serverAuth"})),
      broken_(ours.Issue("chainless", {.names = "DNS:job", .lacks_chain = true})) {}

std::string CertificateStrangers::Come(int i, uint16_t port, const Token& token) {
  const std::pair<absl::string_view, const CertificateFiles*> wrong[kWrong] = {
      {"without a certificate", &nobody_},
      {"of another authority", &strange_},
      {"of another name", &unnamed_},
      {"expired", &expired_},
      {"for servers alone", &server_},
      {"without what lies between it and its authority", &broken_},
  };
  const auto& [who, files] = wrong[i % kWrong];
  return Try(who, *files, TLS1_3_VERSION, port, token);
}

std::string CertificateStrangers::Visit(uint16_t port, const Token& token) {
  std::string in;
  for (int i = 0; i < kWrong; ++i) in += Come(i, port, token);
  in += Try("with TLS 1.2", strange_, TLS1_2_VERSION, port, token);

  Socket honest = ConnectTo(port);
  if (ShakeHands(honest, token, false)) absl::StrAppend(&in, "who says that it has none; ");
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), std::string(1000, '\0')}) {
    Socket at_once = ConnectTo(port), behind = ConnectTo(port);
    at_once.Send(words, Later()).IgnoreError();  // it may close before it has all of it
    AwaitEnd(at_once);
    DG_CHECK(ShakeHands(behind, token, true));
    behind.Send(words, Later()).IgnoreError();
    AwaitEnd(behind);
  }

  const std::string hello =
      Handshake::Create(Handshake::Role::kClient, "", token, true)->TakeOutput();
  stalled_.push_back(ConnectTo(port));
  stalled_.push_back(ConnectTo(port));
  DG_CHECK(stalled_.back().Send(hello.substr(0, hello.size() / 2), Later()).ok());
  for (const std::string& record : {std::string(), std::string("\x16\x03\x01\x02")}) {
    stalled_.push_back(ConnectTo(port));
    DG_CHECK(ShakeHands(stalled_.back(), token, true));
    DG_CHECK(stalled_.back().Send(record, Later()).ok());
  }
  return in;
}

}  // namespace distgrad
