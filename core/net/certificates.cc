// Keeps certificates as their files are, and finds out from options and the environment which files
// these are.
#include "core/net/certificates.h"

#include <sys/stat.h>

#include <cstdlib>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/net/certificate_version.h"

namespace distgrad {
namespace {

// Changes when one of the files is replaced or written.
std::string StampOf(const CertificateFiles& files) {
  std::string stamp;
  for (const std::string& path : {files.cert, files.key, files.ca}) {
    struct stat info = {};
    if (stat(path.c_str(), &info) != 0) info = {};
    absl::StrAppend(&stamp, info.st_dev, " ", info.st_ino, " ", info.st_size, " ",
                    info.st_mtim.tv_sec, " ", info.st_mtim.tv_nsec, "\n");
  }
  return stamp;
}

}  // namespace

Certificates::~Certificates() = default;

absl::StatusOr<std::shared_ptr<Certificates>> Certificates::Load(CertificateFiles files) {
  for (const auto& [path, setting, what] :
       {std::tuple(&files.cert, kCertSetting, "this process's certificate"),
        std::tuple(&files.key, kKeySetting, "the certificate's private key"),
        std::tuple(&files.ca, kCaSetting, "the authorities that are accepted")}) {
    if (!path->empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("certificates need three files, and the one with ", what,
                     " is not given: set ", setting, ", to a PEM file that has it"));
  }
  // OpenSSL takes such a name for all that end in it.
  if (absl::StartsWith(files.name, ".")) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name '", files.name, "' begins with a dot: set ", kNameSetting,
                     ", to a name that the certificates of all have"));
  }
  std::shared_ptr<Certificates> certificates(new Certificates(std::move(files)));
  absl::MutexLock lock(&certificates->mu_);
  certificates->stamp_ = StampOf(certificates->files_);
  DG_ASSIGN_OR_RETURN(certificates->version_, CertificateVersion::Read(certificates->files_));
  struct stat info = {};
  const std::string& key = certificates->files_.key;
  if (stat(key.c_str(), &info) == 0 && (info.st_mode & S_IROTH) != 0) {
    DG_LOG(WARNING) << "every user of this machine can read the private key in " << key << ": "
                    << kKeepToItsUser;
  }
  return certificates;
}

std::shared_ptr<const CertificateVersion> Certificates::Current() {
  const std::string stamp = StampOf(files_);
  {
    absl::MutexLock lock(&mu_);
    if (stamp == stamp_) return version_;
  }
  absl::StatusOr<std::shared_ptr<const CertificateVersion>> read = CertificateVersion::Read(files_);
  absl::MutexLock lock(&mu_);
  if (read.ok()) {
    version_ = *std::move(read);
    stamp_ = stamp;
    warned_of_.clear();
  } else if (std::exchange(warned_of_, stamp) != stamp) {
    // The next connection looks again, also where they do not change: half of the files may have
    // been written, or this process may have lacked a permission or a descriptor.
    DG_LOG(WARNING) << "goes on with the certificates that it has: " << read.status().message();
  }
  return version_;
}

absl::StatusOr<std::shared_ptr<Certificates>> LoadCertificates(
    const TlsOptions& options,
    const std::function<std::optional<std::string>(const std::string&)>& getenv) {
  // A variable's key would not be that of an option's certificate.
  if (options.cert.empty() != options.key.empty()) {
    const bool lacks_key = options.key.empty();
    return absl::InvalidArgumentError(absl::StrCat(
        "the option ", lacks_key ? "tls.cert" : "tls.key", " is given and ",
        lacks_key ? "tls.key" : "tls.cert",
        " is not: a certificate and its key are a pair. Give both, or neither and set ",
        kCertVariable, " and ", kKeyVariable));
  }
  CertificateFiles files;
  bool any = false;
  for (const auto& [option, variable, field] :
       {std::tuple(&options.cert, kCertVariable, &files.cert),
        std::tuple(&options.key, kKeyVariable, &files.key),
        std::tuple(&options.ca, kCaVariable, &files.ca),
        std::tuple(&options.name, kNameVariable, &files.name)}) {
    if (!option->empty()) {
      *field = *option;
      any = true;
      continue;
    }
    const std::optional<std::string> value = getenv(variable);
    if (!value.has_value()) continue;
    // Whoever sets it wants certificates.
    if (value->empty()) return absl::InvalidArgumentError(absl::StrCat(variable, " is empty"));
    *field = *value;
    any = true;
  }
  if (!any) return std::shared_ptr<Certificates>();
  return Certificates::Load(std::move(files));
}

absl::StatusOr<std::shared_ptr<Certificates>> LoadCertificates(const TlsOptions& options) {
  return LoadCertificates(options, [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return value;
  });
}

}  // namespace distgrad
