// Loads the key from a file or the environment, and computes HMACs with libcrypto.
#include "core/net/cluster_key.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/net/certificate_files.h"

namespace distgrad {
namespace {

constexpr size_t kMaxFile = 4096;  // bytes; whatever is longer is no key

absl::StatusOr<std::string> ReadKeyFile(const std::string& path) {
  const std::string what =
      absl::StrCat("cannot read the cluster key in ", path, " (", kClusterKeySetting, ")");
  std::string text(kMaxFile + 1, '\0');  // first: nothing is open where there is no memory for it
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, what);
  size_t size = 0;
  ssize_t n = 0;
  do {
    n = read(fd, &text[size], text.size() - size);
    if (n > 0) size += n;
  } while ((n > 0 && size < text.size()) || (n < 0 && errno == EINTR));
  const int error = errno;
  struct stat info = {};
  const bool open_to_all = fstat(fd, &info) == 0 && (info.st_mode & S_IROTH) != 0;
  close(fd);
  if (n < 0) return absl::ErrnoToStatus(error, what);
  if (size > kMaxFile) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": more than ", kMaxFile, " bytes"));
  }
  if (open_to_all) {
    DG_LOG(WARNING) << "every user of this machine can read the key in " << path << ": "
                    << kKeepToItsUser;
  }
  text.resize(size);
  return text;
}

// What `text` holds, which `where` has.
absl::StatusOr<ClusterKey> ParseKeys(absl::string_view text, const std::string& where) {
  std::vector<absl::string_view> keys;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const absl::string_view key = absl::StripAsciiWhitespace(line);
    if (!key.empty()) keys.push_back(key);
  }
  // A user who sets a key wants one: an empty one must not quietly mean that none is needed.
  if (keys.empty()) return absl::InvalidArgumentError(absl::StrCat(where, " is empty"));
  if (keys.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " has ", keys.size(),
                     " keys, one in each line; there can be two, while one is exchanged"));
  }
  const ClusterKey key(keys[0], keys.size() == 2 ? keys[1] : "");
  DG_RETURN_IF_ERROR(Annotate(CheckClusterKey(key), where));
  return key;
}

}  // namespace

void Wipe(std::string* text) {
  text->resize(text->capacity());
  OPENSSL_cleanse(text->data(), text->size());
  text->clear();
}

absl::Status CheckClusterKey(const ClusterKey& key) {
  for (const std::string* const each : {&key.used(), &key.accepted()}) {
    if (each->empty() || each->size() >= kMinKeyBytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("the cluster key has ", each->size(),
                                                   " bytes; it needs at least ", kMinKeyBytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<ClusterKey> LoadClusterKey(
    const std::string& key_file,
    const std::function<std::optional<std::string>(const std::string&)>& getenv) {
  std::string path = key_file;
  if (path.empty()) {
    std::optional<std::string> variable = getenv("DISTGRAD_KEY");
    const std::optional<std::string> file = getenv("DISTGRAD_KEY_FILE");
    if (variable.has_value() && file.has_value()) {
      return absl::InvalidArgumentError("both DISTGRAD_KEY and DISTGRAD_KEY_FILE are set");
    }
    if (!variable.has_value() && !file.has_value()) return ClusterKey();
    if (variable.has_value()) {
      absl::StatusOr<ClusterKey> keys = ParseKeys(*variable, "DISTGRAD_KEY");
      Wipe(&*variable);
      return keys;
    }
    if (file->empty()) return absl::InvalidArgumentError("DISTGRAD_KEY_FILE is empty");
    path = *file;
  }
  DG_ASSIGN_OR_RETURN(std::string text, ReadKeyFile(path));
  absl::StatusOr<ClusterKey> keys =
      ParseKeys(text, absl::StrCat(path, " (", kClusterKeySetting, ")"));
  Wipe(&text);
  return keys;
}

absl::StatusOr<ClusterKey> LoadClusterKey(const std::string& key_file) {
  return LoadClusterKey(key_file, [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return value;
  });
}

absl::StatusOr<Digest> Hmac(absl::string_view key, absl::string_view text) {
  Digest digest;
  unsigned int size = digest.size();
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data(),
           &size) == nullptr ||
      size != digest.size()) {
    return absl::InternalError("the crypto library cannot compute HMAC-SHA256");
  }
  return digest;
}

bool SameDigest(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::Status FillRandom(uint8_t* data, size_t size) {
  if (RAND_bytes(data, static_cast<int>(size)) == 1) return absl::OkStatus();
  return absl::InternalError("the crypto library has no random numbers");
}

}  // namespace distgrad
