// What a program may say of TLS by certificates, in the place of the environment.
#ifndef DISTGRAD_CORE_NET_TLS_OPTIONS_H_
#define DISTGRAD_CORE_NET_TLS_OPTIONS_H_

#include <optional>
#include <string>

namespace distgrad {

// What is "" here, or unset, is as the variable says. A certificate and its key come from one
// place: both from here, or both from their variables. docs/security.md, "Certificates".
struct TlsOptions {
  // PEM files: this process's certificate, and then those between it and the authority; its private
  // key, without a passphrase; and the authorities whose certificates are accepted.
  // DISTGRAD_TLS_CERT, DISTGRAD_TLS_KEY, DISTGRAD_TLS_CA.
  std::string cert = {}, key = {}, ca = {};
  // The name that a certificate of the others has to have: a DNS name, an IP address, or a URI.
  // DISTGRAD_TLS_NAME, or else one of those that this process's own certificate has, but for
  // localhost and loopback addresses, which every machine has.
  std::string name = {};
  // Whether a worker's Unix-domain sockets are encrypted as well, by certificates or the cluster
  // key. DISTGRAD_ENCRYPT_LOCAL, or false.
  std::optional<bool> encrypt_local = std::nullopt;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_TLS_OPTIONS_H_
