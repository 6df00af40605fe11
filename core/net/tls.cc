// Drives OpenSSL's libssl, which reads from and writes to the buffers of the session.
#include "core/net/tls.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/net/certificate_version.h"
#include "core/net/openssl_objects.h"

namespace distgrad {
namespace {

// At first, and at most: a record, and as many as are worth a system call.
constexpr size_t kFirstInputBytes = 17 << 10, kMostInputBytes = 256 << 10;
// Reading makes output too: an answer to each request for new keys, which no other end needs often.
constexpr size_t kMaxUnsent = 1 << 20;
// The one cipher suite, whose hash is that of the secret.
constexpr unsigned char kCipherId[] = {0x13, 0x01};
constexpr absl::string_view kIdentity = "distgrad";  // both ends know which secret it is
// The label and the length of what both ends of one session, and no others, can compute: RFC 9266.
constexpr absl::string_view kExporterLabel = "EXPORTER-Channel-Binding";
constexpr size_t kExporterBytes = 32;
// So many records without a byte, and messages of TLS's own within them, may come, and one more for
// each of so many bytes: of an honest end tickets at the beginning, and a new key now and then.
// Each takes its time, and is read in the turn of the one before it.
constexpr int kMostEmptyRecords = 32;
constexpr uint64_t kBytesOfAnEmptyRecord = 64 << 10;
// SSL_write_ex() takes and SSL_read_ex() gives no more than fits into an int in some places.
constexpr size_t kMaxCall = 1 << 30;

absl::Status LibraryError(absl::string_view what) {
  return absl::InternalError(absl::StrCat("TLS: ", what, ": ", TakeOpensslError()));
}

// What is wrong with a certificate, as the alert says by which it is refused (RFC 8446,
// section 6.2); "" for alerts that are about something else.
absl::string_view MeaningOf(int alert) {
  switch (alert) {
    case SSL_AD_UNKNOWN_CA:
      return "it is of no authority that is accepted there";
    case SSL_AD_CERTIFICATE_EXPIRED:
      return "it has expired";
    case SSL_AD_HANDSHAKE_FAILURE:
      return "it has not the name that is asked for there, as it seems";
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
      return "it is not for this use";
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_ACCESS_DENIED:
    case SSL_AD_CERTIFICATE_REQUIRED:
      return "it is not valid there";
    default:
      return "";
  }
}

absl::string_view TextOf(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

using Session = std::unique_ptr<SSL_SESSION, OpensslFree<SSL_SESSION_free>>;

// The secret in the shape in which OpenSSL takes a pre-shared key.
Session NewSession(SSL* ssl, const Digest& secret) {
  Session session(SSL_SESSION_new());
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherId);
  if (session == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(session.get(), secret.data(), secret.size()) != 1 ||
      SSL_SESSION_set_cipher(session.get(), cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) != 1) {
    return nullptr;
  }
  return session;
}

}  // namespace

struct TlsSession::Library {
  std::unique_ptr<SSL, OpensslFree<SSL_free>> ssl;

  static TlsSession& Of(const SSL* ssl) { return *static_cast<TlsSession*>(SSL_get_app_data(ssl)); }
  static TlsSession& Of(BIO* bio) { return *static_cast<TlsSession*>(BIO_get_data(bio)); }

  static int UseSecret(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* size,
                       SSL_SESSION** session) {
    *session = NewSession(ssl, Of(ssl).secret_).release();
    *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
    *size = kIdentity.size();
    return *session != nullptr ? 1 : 0;
  }

  static int FindSecret(SSL* ssl, const unsigned char* identity, size_t size,
                        SSL_SESSION** session) {
    *session = nullptr;
    if (absl::string_view(reinterpret_cast<const char*>(identity), size) != kIdentity) return 1;
    *session = NewSession(ssl, Of(ssl).secret_).release();
    return *session != nullptr ? 1 : 0;
  }

  // Called for each certificate of the other end's chain, the end's own last.
  static int VerifyPeer(int is_valid, X509_STORE_CTX* check) {
    const auto* const ssl = static_cast<const SSL*>(
        X509_STORE_CTX_get_ex_data(check, SSL_get_ex_data_X509_STORE_CTX_idx()));
    TlsSession& session = Of(ssl);
    if (is_valid != 1) {
      session.refused_ = absl::UnauthenticatedError(absl::StrCat(
          X509_verify_cert_error_string(X509_STORE_CTX_get_error(check)),
          " (is it valid now, and of an authority in the file that ", kCaSetting, ", names?)"));
    } else if (X509_STORE_CTX_get_error_depth(check) == 0) {
      session.refused_ = session.certificates_->CheckName(X509_STORE_CTX_get_current_cert(check));
      if (!session.refused_.ok()) {
        X509_STORE_CTX_set_error(check, X509_V_ERR_APPLICATION_VERIFICATION);
      }
    }
    return session.refused_.ok() ? 1 : 0;
  }

  static int ReadInput(BIO* bio, char* data, size_t size, size_t* read) {
    TlsSession& session = Of(bio);
    BIO_clear_retry_flags(bio);
    *read = std::min(size, session.input_end_ - session.input_begin_);
    // Read() would otherwise not return before the end of the input.
    if (*read == 0 || session.HasTooManyEmpty()) {
      BIO_set_retry_read(bio);
      return 0;
    }
    std::memcpy(data, &session.input_[session.input_begin_], *read);
    session.input_begin_ += *read;
    return 1;
  }

  static int WriteOutput(BIO* bio, const char* data, size_t size, size_t* written) {
    Of(bio).output_.append(data, size);
    *written = size;
    return 1;
  }

  static long Control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  // Called for the head of each record, and for each message of TLS's own, of which a record may
  // have many.
  static void OnMessage(int is_written, int, int type, const void*, size_t, SSL* ssl, void*) {
    if (is_written != 0 || (type != SSL3_RT_HEADER && type != SSL3_RT_HANDSHAKE)) return;
    TlsSession& session = Of(ssl);
    ++session.empty_;
    session.in_record_ = session.in_record_ || type == SSL3_RT_HEADER;
  }
};

// What all sessions of the process have in common, which takes longer to make than a session.
// Immutable after construction, and thread-safe.
class TlsSession::Settings {
 public:
  // An error is that of this call: there may be memory for them at the next one.
  static absl::StatusOr<const Settings*> OfProcess() {
    static absl::Mutex mu(absl::kConstInit);
    // They stay to the end: sessions may be later than whatever ends a process.
    static const Settings* settings ABSL_GUARDED_BY(mu) = nullptr;
    absl::MutexLock lock(&mu);
    if (settings == nullptr) {
      DG_ASSIGN_OR_RETURN(Settings made, Make());
      settings = new Settings(std::move(made));
    }
    return settings;
  }

  SSL_CTX* context() const { return context_.get(); }
  const BIO_METHOD* method() const { return method_.get(); }

 private:
  static absl::StatusOr<Settings> Make() {
    Settings settings;
    settings.context_ = NewTls13Context();
    SSL_CTX* context = settings.context();
    if (context == nullptr) {
      return LibraryError("this machine's OpenSSL cannot do what distgrad needs");
    }
    SSL_CTX_set_psk_use_session_callback(context, &Library::UseSecret);
    SSL_CTX_set_psk_find_session_callback(context, &Library::FindSecret);

    settings.method_.reset(BIO_meth_new(BIO_TYPE_SOURCE_SINK, "distgrad"));
    BIO_METHOD* method = settings.method_.get();
    if (method == nullptr || BIO_meth_set_read_ex(method, &Library::ReadInput) != 1 ||
        BIO_meth_set_write_ex(method, &Library::WriteOutput) != 1 ||
        BIO_meth_set_ctrl(method, &Library::Control) != 1) {
      return LibraryError("no buffers");
    }
    return settings;
  }

  SslContext context_;
  std::unique_ptr<BIO_METHOD, OpensslFree<BIO_meth_free>> method_;
};

bool TlsSession::HasTooManyEmpty() const {
  // The head of a record comes before its bytes.
  return past_handshake_ && empty_ - (in_record_ ? 1 : 0) > kMostEmptyRecords;
}

void TlsSession::CountBytes(size_t size) {
  if (std::exchange(in_record_, false)) --empty_;
  bytes_ += size;
  empty_ -= static_cast<int>(std::min<uint64_t>(empty_, bytes_ / kBytesOfAnEmptyRecord));
  bytes_ %= kBytesOfAnEmptyRecord;
}

TlsSession::TlsSession() : library_(std::make_unique<Library>()) {}
TlsSession::~TlsSession() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

absl::StatusOr<std::unique_ptr<TlsSession>> TlsSession::Create(Handshake::Role role,
                                                               const Digest& secret,
                                                               uint64_t key_bytes) {
  std::unique_ptr<TlsSession> session(new TlsSession());
  session->secret_ = secret;
  session->key_bytes_ = key_bytes;
  DG_ASSIGN_OR_RETURN(const Settings* const settings, Settings::OfProcess());
  DG_RETURN_IF_ERROR(session->Init(role, settings->context()));
  // No server can show a certificate in the secret's place: this client knows no authority.
  if (role == Handshake::Role::kClient) {
    SSL_set_verify(session->library_->ssl.get(), SSL_VERIFY_PEER, nullptr);
  }
  return session;
}

absl::StatusOr<std::unique_ptr<TlsSession>> TlsSession::Create(Handshake::Role role,
                                                               Certificates& certificates) {
  std::unique_ptr<TlsSession> session(new TlsSession());
  session->certificates_ = certificates.Current();
  SSL_CTX* const context = session->certificates_->context();
  DG_RETURN_IF_ERROR(session->Init(role, context));
  SSL_set_verify(session->library_->ssl.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT,
                 &Library::VerifyPeer);
  return session;
}

absl::StatusOr<std::unique_ptr<TlsSession>> TlsSession::Create(
    const Handshake& handshake, const std::shared_ptr<Certificates>& certificates) {
  DG_ASSIGN_OR_RETURN(const Digest secret, handshake.Secret());
  if (certificates != nullptr) {
    DG_ASSIGN_OR_RETURN(std::unique_ptr<TlsSession> session,
                        Create(handshake.role(), *certificates));
    session->secret_ = secret;
    return session;
  }
  return Create(handshake.role(), secret);
}

absl::Status TlsSession::Init(Handshake::Role role, SSL_CTX* context) {
  DG_ASSIGN_OR_RETURN(const Settings* const settings, Settings::OfProcess());
  ERR_clear_error();
  library_->ssl.reset(SSL_new(context));
  BIO* bio = library_->ssl != nullptr ? BIO_new(settings->method()) : nullptr;
  if (bio == nullptr) return LibraryError("no memory for a session");
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL* ssl = library_->ssl.get();
  SSL_set_bio(ssl, bio, bio);
  SSL_set_app_data(ssl, this);
  SSL_set_msg_callback(ssl, &Library::OnMessage);
  if (role == Handshake::Role::kClient) {
    SSL_set_connect_state(ssl);
  } else {
    SSL_set_accept_state(ssl);
  }
  return absl::OkStatus();
}

absl::Status TlsSession::Error(int result) {
  const int error = SSL_get_error(library_->ssl.get(), result);
  if (error == SSL_ERROR_WANT_READ) return absl::OkStatus();
  if (error == SSL_ERROR_ZERO_RETURN) {
    return absl::UnavailableError("the other end has closed the connection");
  }
  const int alert = ERR_GET_REASON(ERR_peek_error()) - SSL_AD_REASON_OFFSET;
  const std::string reason = TakeOpensslError();
  if (!refused_.ok()) {
    return absl::PermissionDeniedError(
        absl::StrCat("the other end's certificate is refused: ", refused_.message()));
  }
  // A client that awaits no welcome has not shown its certificate yet.
  const bool has_shown = awaits_welcome_ || SSL_is_server(library_->ssl.get()) == 1;
  if (certificates_ != nullptr && has_shown && !MeaningOf(alert).empty()) {
    // What comes behind the handshake is from who has shown its certificate, and is not a forgery.
    return absl::Status(
        awaits_welcome_ ? absl::StatusCode::kUnauthenticated : absl::StatusCode::kUnavailable,
        absl::StrCat("the other end refuses this process's certificate: ", MeaningOf(alert),
                     " (TLS: ", reason, "). Its log says more; the file here is the one that ",
                     kCertSetting, ", names"));
  }
  if (certificates_ != nullptr && alert > 0) {
    return absl::UnavailableError(absl::StrCat("the other end has ended TLS (", reason, ")"));
  }
  return absl::UnavailableError(absl::StrCat(
      "what arrives is not what the other end has sent, or from another sender (TLS: ", reason,
      ")"));
}

absl::Status TlsSession::Establish() {
  if (established_) return absl::OkStatus();
  ERR_clear_error();
  SSL* ssl = library_->ssl.get();
  const int result = SSL_do_handshake(ssl);
  if (result != 1) return Error(result);
  if (!std::exchange(past_handshake_, true)) {
    empty_ = 0;
    in_record_ = false;
  }
  if (certificates_ != nullptr) return ProveHandshake();
  // A session that is not resumed knows nothing of the secret.
  if (SSL_session_reused(ssl) != 1) {
    return absl::UnavailableError("TLS: the other end does not use what both know");
  }
  established_ = true;
  return absl::OkStatus();
}

absl::StatusOr<Digest> TlsSession::ProofOf(bool server) const {
  std::string text(server ? "server" : "client");
  const size_t purpose = text.size();
  text.resize(purpose + kExporterBytes);
  if (SSL_export_keying_material(
          library_->ssl.get(), reinterpret_cast<unsigned char*>(&text[purpose]), kExporterBytes,
          kExporterLabel.data(), kExporterLabel.size(), nullptr, 0, 0) != 1) {
    return LibraryError("nothing to tell this session from others by");
  }
  // The secret is of this handshake alone: it is made of what is random in both hellos.
  return Hmac(TextOf(secret_), text);
}

absl::Status TlsSession::ProveHandshake() {
  SSL* ssl = library_->ssl.get();
  const bool is_server = SSL_is_server(ssl) == 1;
  if (!std::exchange(has_proved_, true)) {
    DG_ASSIGN_OR_RETURN(const Digest proof, ProofOf(is_server));
    DG_RETURN_IF_ERROR(Write(TextOf(proof)));
  }
  awaits_welcome_ = !is_server;
  while (other_proof_size_ < other_proof_.size()) {
    DG_ASSIGN_OR_RETURN(const size_t size, Read(&other_proof_[other_proof_size_],
                                                other_proof_.size() - other_proof_size_));
    if (size == 0) return absl::OkStatus();  // it is on its way
    other_proof_size_ += size;
  }
  DG_ASSIGN_OR_RETURN(const Digest expected, ProofOf(!is_server));
  if (!SameDigest(other_proof_, expected)) {
    const std::set<std::string> names = NamesOf(SSL_get0_peer_certificate(ssl));
    return absl::UnavailableError(absl::StrCat(
        "TLS: the other end is not the one that has shaken hands before: somebody on the way, who "
        "has a certificate that is accepted here but not the cluster key (or without one the "
        "listener's token), has taken its place, or has exchanged connections. The certificate is "
        "for ",
        names.empty() ? "no name" : absl::StrJoin(names, ", ")));
  }
  awaits_welcome_ = false;
  established_ = true;
  return absl::OkStatus();
}

absl::Span<char> TlsSession::InputSpace() {
  if (input_begin_ == input_end_) {
    input_begin_ = input_end_ = 0;
    const size_t size = !input_was_full_ ? std::max(input_size_, kFirstInputBytes)
                                         : std::min(4 * input_size_, kMostInputBytes);
    if (size > input_size_) {
      input_.reset(new char[size]);  // not cleared
      input_size_ = size;
    }
  }
  return absl::MakeSpan(&input_[input_end_], input_size_ - input_end_);
}

void TlsSession::AddInput(size_t size) {
  input_end_ += size;
  input_was_full_ = input_end_ == input_size_;
}

bool TlsSession::HasInput() const {
  return input_begin_ < input_end_ || SSL_pending(library_->ssl.get()) > 0;
}

absl::StatusOr<size_t> TlsSession::Read(void* data, size_t size) {
  ERR_clear_error();
  if (output().size() > kMaxUnsent) {
    return absl::UnavailableError("the other end asks for new keys again and again");
  }
  size_t read = 0;
  const int result = SSL_read_ex(library_->ssl.get(), data, std::min(size, kMaxCall), &read);
  if (result == 1) {
    CountBytes(read);
  } else {
    DG_RETURN_IF_ERROR(Error(result));
  }
  if (HasTooManyEmpty()) {
    return absl::UnavailableError("the other end sends records without a byte again and again");
  }
  return read;
}

absl::Status TlsSession::Write(absl::string_view bytes) {
  SSL* ssl = library_->ssl.get();
  while (!bytes.empty()) {
    ERR_clear_error();
    if (written_ >= key_bytes_) {
      if (SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return LibraryError("a new key");
      written_ = 0;
    }
    size_t written = 0;
    const size_t size = std::min(bytes.size(), kMaxCall);
    const int result = SSL_write_ex(ssl, bytes.data(), size, &written);
    // Output is never full, so it never asks to be called again.
    if (result != 1) {
      absl::Status status = Error(result);
      return status.ok() ? absl::InternalError("TLS: a write that waits to read") : status;
    }
    written_ += written;
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

void TlsSession::DropOutput(size_t size) {
  output_begin_ += size;
  // Where it is never empty what is sent goes, too, but not byte by byte.
  if (output_begin_ < output_.size() && output_begin_ < kMaxUnsent) return;
  output_.erase(0, output_begin_);
  output_begin_ = 0;
}

}  // namespace distgrad
