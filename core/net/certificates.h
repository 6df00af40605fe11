// The certificate by which this process shows the other processes of its job who it is, and by what
// it knows theirs. For jobs whose platform issues certificates (SPIFFE, cert-manager), in the place
// of a cluster key or beside one.
//
// The files may be replaced while the job runs: each new connection looks whether they have
// changed, and reads them anew if so. Connections that stand go on as they are.
#ifndef DISTGRAD_CORE_NET_CERTIFICATES_H_
#define DISTGRAD_CORE_NET_CERTIFICATES_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/net/certificate_files.h"
#include "core/net/tls_options.h"

namespace distgrad {

class CertificateVersion;  // certificate_version.h

// Thread-safe.
class Certificates {
 public:
  // kInvalidArgument, with the file and the option or variable to set, if one is not given or
  // cannot be used; for instance a key that is not the certificate's, or a certificate without a
  // name. kResourceExhausted where this process can open none.
  static absl::StatusOr<std::shared_ptr<Certificates>> Load(CertificateFiles files);
  ~Certificates();
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  // Returns what a new connection uses: that of the files as they are now, or, with a warning in
  // the log, the former one if they cannot be used.
  std::shared_ptr<const CertificateVersion> Current() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit Certificates(CertificateFiles files) : files_(std::move(files)) {}

  const CertificateFiles files_;
  absl::Mutex mu_;
  std::shared_ptr<const CertificateVersion> version_ ABSL_GUARDED_BY(mu_);
  std::string stamp_ ABSL_GUARDED_BY(mu_);      // of the files that version_ is of
  std::string warned_of_ ABSL_GUARDED_BY(mu_);  // the stamp of those that could not be used
};

// The certificates of this process, from the files and with the name that `options` have, or else
// DISTGRAD_TLS_CERT, DISTGRAD_TLS_KEY, DISTGRAD_TLS_CA and DISTGRAD_TLS_NAME; nullptr where nothing
// is set. kInvalidArgument if some are set and others are not, or the options have a certificate
// without a key or a key without a certificate, whatever the variables say; else what Load() says.
absl::StatusOr<std::shared_ptr<Certificates>> LoadCertificates(
    const TlsOptions& options,
    const std::function<std::optional<std::string>(const std::string&)>& getenv);

// The same with this process's environment.
absl::StatusOr<std::shared_ptr<Certificates>> LoadCertificates(const TlsOptions& options = {});

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_CERTIFICATES_H_
