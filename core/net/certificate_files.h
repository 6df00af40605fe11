// The files of a process's certificate, and the options and variables that name them.
#ifndef DISTGRAD_CORE_NET_CERTIFICATE_FILES_H_
#define DISTGRAD_CORE_NET_CERTIFICATE_FILES_H_

#include <string>

namespace distgrad {

inline constexpr char kCertVariable[] = "DISTGRAD_TLS_CERT", kKeyVariable[] = "DISTGRAD_TLS_KEY",
                      kCaVariable[] = "DISTGRAD_TLS_CA", kNameVariable[] = "DISTGRAD_TLS_NAME";
// What an error says is to be set: the option (tls_options.h) or the variable.
inline constexpr char kCertSetting[] = "the option tls.cert, or DISTGRAD_TLS_CERT",
                      kKeySetting[] = "the option tls.key, or DISTGRAD_TLS_KEY",
                      kCaSetting[] = "the option tls.ca, or DISTGRAD_TLS_CA",
                      kNameSetting[] = "the option tls.name, or DISTGRAD_TLS_NAME";

// What a warning says is to be done with a file that has a key, of either kind, and that every user
// of the machine can read.
inline constexpr char kKeepToItsUser[] =
    "set its mode to 0600, or to 0640 with a group of its own (in Kubernetes defaultMode: 0400 of "
    "the Secret's volume, or 0440 with an fsGroup)";

struct CertificateFiles {
  std::string cert;  // PEM: this process's certificate, and then those between it and the authority
  std::string key;   // PEM: its private key
  std::string ca;    // PEM: the authorities whose certificates are accepted
  // The name that a certificate of the others has to have: a DNS name, an IP address, or a URI
  // ("spiffe://cluster/ns/train/sa/trainer"), among its subjectAltNames. "": one of those that this
  // process's own certificate has, but for localhost and loopback addresses, which every machine
  // has.
  std::string name = {};
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_CERTIFICATE_FILES_H_
