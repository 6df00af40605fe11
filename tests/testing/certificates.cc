// Makes keys and certificates with OpenSSL.
#include "tests/testing/certificates.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <filesystem>
#include <utility>

#include "core/base/check.h"

namespace distgrad {
namespace {

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Free<X509_free>>;

constexpr long kDay = 24 * 60 * 60;

// As a whole or not at all.
template <typename F>
void WriteFile(const std::string& path, F&& write) {
  const std::string draft = path + ".new";
  FILE* const file = std::fopen(draft.c_str(), "w");
  DG_CHECK(file != nullptr && write(file) == 1) << path;
  DG_CHECK(std::fclose(file) == 0) << path;
  std::filesystem::rename(draft, path);
}

void Extend(X509* certificate, X509* issuer, int what, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, what, value.c_str());
  DG_CHECK(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1) << value;
  X509_EXTENSION_free(extension);
}

Certificate Sign(EVP_PKEY* key, const std::string& subject, X509* issuer, EVP_PKEY* issuer_key,
                 const TestAuthority::Request& request, bool is_authority = false) {
  static long serial = 0;
  Certificate certificate(X509_new());
  X509* const x = certificate.get();
  X509_set_version(x, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(x), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(x), -(request.days < 0 ? 30 : 1) * kDay);
  X509_gmtime_adj(X509_getm_notAfter(x), request.days * kDay);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(subject.c_str()), -1, -1, 0);
  X509_set_issuer_name(x, X509_get_subject_name(issuer == nullptr ? x : issuer));
  X509_set_pubkey(x, key);
  if (is_authority)
    Extend(x, issuer == nullptr ? x : issuer, NID_basic_constraints, "critical,CA:TRUE");
  if (!request.names.empty()) Extend(x, issuer, NID_subject_alt_name, request.names);
  if (!request.use.empty()) Extend(x, issuer, NID_ext_key_usage, request.use);
  DG_CHECK(X509_sign(x, issuer_key, EVP_sha256()) > 0);
  return certificate;
}

}  // namespace

struct TestAuthority::Library {
  explicit Library(const std::string& name)
      : certificate(Sign(key.get(), name, nullptr, key.get(), {.names = ""}, true)) {}

  Key key{EVP_EC_gen("P-256")};
  Certificate certificate;
};

TestAuthority::TestAuthority(std::string folder)
    : folder_(std::move(folder)),
      library_(std::make_unique<Library>("authority " +
                                         std::filesystem::path(folder_).filename().string())) {
  std::filesystem::create_directories(folder_);
  WriteFile(folder_ + "/ca.pem",
            [&](FILE* file) { return PEM_write_X509(file, library_->certificate.get()); });
}

TestAuthority::~TestAuthority() = default;

CertificateFiles TestAuthority::Issue(const std::string& file, const Request& request) {
  const Key key(EVP_EC_gen("P-256"));
  const Key middle_key(EVP_EC_gen("P-256"));
  const Certificate middle = Sign(middle_key.get(), "between", library_->certificate.get(),
                                  library_->key.get(), {.names = ""}, true);
  const Certificate certificate =
      request.lacks_chain
          ? Sign(key.get(), file, middle.get(), middle_key.get(), request)
          : Sign(key.get(), file, library_->certificate.get(), library_->key.get(), request);
  CertificateFiles files = {.cert = folder_ + "/" + file + ".pem",
                            .key = folder_ + "/" + file + ".key",
                            .ca = folder_ + "/ca.pem"};
  WriteFile(files.key, [&](FILE* to) {
    return PEM_write_PrivateKey(to, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  WriteFile(files.cert, [&](FILE* to) { return PEM_write_X509(to, certificate.get()); });
  return files;
}

}  // namespace distgrad
