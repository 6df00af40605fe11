// Reads certificates into OpenSSL, and checks the names of others'.
#include "core/net/certificate_version.h"

#include <arpa/inet.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "core/base/descriptors.h"

namespace distgrad {
namespace {

// What a certificate and those behind it may have: both ends of a handshake send it in one go.
constexpr size_t kMaxChainBytes = 12 << 10;

absl::Status Unusable(absl::string_view what, const std::string& path, const char* setting,
                      absl::string_view wanted) {
  const unsigned long error = ERR_peek_error();
  // That has nothing to do with the file.
  if (ERR_SYSTEM_ERROR(error) && IsExhaustion(ERR_GET_REASON(error))) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot read the ", what, " in ", path, ": ", TakeOpensslError()));
  }
  return absl::InvalidArgumentError(absl::StrCat("cannot use the ", what, " in ", path, " (",
                                                 TakeOpensslError(), "): set ", setting, ", to ",
                                                 wanted, ", which this process may read"));
}

std::string AddressText(const unsigned char* bytes, int size) {
  char text[INET6_ADDRSTRLEN] = {};
  const int family = size == 4 ? AF_INET : size == 16 ? AF_INET6 : AF_UNSPEC;
  if (family == AF_UNSPEC || inet_ntop(family, bytes, text, sizeof(text)) == nullptr) return "";
  return text;
}

// As NamesOf() writes it.
std::string NameOf(const std::string& text) {
  if (absl::StrContains(text, "://")) return absl::StrCat("URI:", text);
  unsigned char bytes[16];
  for (const auto& [family, size] : {std::pair(AF_INET, 4), std::pair(AF_INET6, 16)}) {
    if (inet_pton(family, text.c_str(), bytes) == 1) {
      return absl::StrCat("IP:", AddressText(bytes, size));
    }
  }
  return absl::StrCat("DNS:", absl::AsciiStrToLower(text));
}

// A name of every machine, which says nothing of whose the certificate is. As NamesOf() writes it.
bool IsOfEveryMachine(absl::string_view name) {
  return name == "DNS:localhost" || absl::EndsWith(name, ".localhost") ||
         absl::StartsWith(name, "IP:127.") || absl::StartsWith(name, "IP:::ffff:127.") ||
         name == "IP:::1";
}

// Those of an own certificate by which others are known where no name is given.
std::set<std::string> NamesInCommon(const X509* own) {
  std::set<std::string> names = NamesOf(own);
  for (auto name = names.begin(); name != names.end();) {
    name = IsOfEveryMachine(*name) ? names.erase(name) : std::next(name);
  }
  return names;
}

}  // namespace

std::set<std::string> NamesOf(const X509* certificate) {
  std::set<std::string> names;
  const std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES_free>> all(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; all != nullptr && i < sk_GENERAL_NAME_num(all.get()); ++i) {
    int type = 0;
    const auto* const value = static_cast<const ASN1_STRING*>(
        GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(all.get(), i), &type));
    if (type != GEN_DNS && type != GEN_URI && type != GEN_IPADD) continue;
    const unsigned char* const bytes = ASN1_STRING_get0_data(value);
    const int size = ASN1_STRING_length(value);
    const std::string text(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
    // One with a zero in it would be read as a shorter one elsewhere.
    if (type != GEN_IPADD && absl::StrContains(text, '\0')) continue;
    if (type == GEN_DNS) names.insert(absl::StrCat("DNS:", absl::AsciiStrToLower(text)));
    if (type == GEN_URI) names.insert(absl::StrCat("URI:", text));
    if (type == GEN_IPADD && !AddressText(bytes, size).empty()) {
      names.insert(absl::StrCat("IP:", AddressText(bytes, size)));
    }
  }
  ERR_clear_error();
  return names;
}

absl::StatusOr<std::shared_ptr<const CertificateVersion>> CertificateVersion::Read(
    const CertificateFiles& files) {
  std::shared_ptr<CertificateVersion> version(new CertificateVersion());
  version->context_ = NewTls13Context();
  SSL_CTX* const context = version->context();
  if (context == nullptr) {
    return absl::InternalError(
        absl::StrCat("this machine's OpenSSL cannot do what distgrad needs: ", TakeOpensslError()));
  }
  if (SSL_CTX_use_certificate_chain_file(context, files.cert.c_str()) != 1) {
    return Unusable("certificate", files.cert, kCertSetting, "a PEM file with a certificate");
  }
  // A key with a passphrase would ask for it on the terminal.
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return 0; });
  if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return Unusable("private key", files.key, kKeySetting,
                    "a PEM file with the certificate's key, without a passphrase");
  }
  if (SSL_CTX_load_verify_file(context, files.ca.c_str()) != 1) {
    return Unusable("authorities", files.ca, kCaSetting, "a PEM file with certificates of them");
  }
  const X509* const own = SSL_CTX_get0_certificate(context);
  STACK_OF(X509)* chain = nullptr;
  SSL_CTX_get0_chain_certs(context, &chain);
  size_t bytes = static_cast<size_t>(std::max(i2d_X509(own, nullptr), 0));
  for (int i = 0; i < sk_X509_num(chain); ++i) {
    bytes += static_cast<size_t>(std::max(i2d_X509(sk_X509_value(chain, i), nullptr), 0));
  }
  if (bytes > kMaxChainBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the certificates in ", files.cert, " (", kCertSetting, ") have ", bytes,
                     " bytes, and there may be ", kMaxChainBytes,
                     ": leave out those that do not lie between this process's and the authority"));
  }
  version->wanted_ = files.name;
  version->names_ = files.name.empty() ? NamesInCommon(own) : std::set{NameOf(files.name)};
  if (version->names_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the certificate in ", files.cert, " (", kCertSetting,
        ") has no subjectAltName by which others could know it (a DNS name, an IP address or a "
        "URI; localhost and loopback addresses are names of every machine): have one issued that "
        "has, or set ",
        kNameSetting, ", to the name that the others' have"));
  }
  return std::shared_ptr<const CertificateVersion>(std::move(version));
}

absl::Status CertificateVersion::CheckName(const X509* certificate) const {
  const std::set<std::string> has = NamesOf(certificate);
  for (const std::string& name : has) {
    if (names_.count(name) > 0) return absl::OkStatus();
  }
  // A certificate may be for all names below one.
  if (!wanted_.empty() && names_.begin()->rfind("DNS:", 0) == 0 &&
      X509_check_host(const_cast<X509*>(certificate), wanted_.data(), wanted_.size(),
                      X509_CHECK_FLAG_NEVER_CHECK_SUBJECT | X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS,
                      nullptr) == 1) {
    return absl::OkStatus();
  }
  return absl::UnauthenticatedError(absl::StrCat(
      "it is for ", has.empty() ? "no name" : absl::StrJoin(has, ", "), ", and not for ",
      absl::StrJoin(names_, " or "), ": if the others of this job have other names, set ",
      kNameSetting, ", to the one that all have"));
}

}  // namespace distgrad
