// Writes the manifest as JSON for people and programs, and reads it as what may come from anybody.
#include "core/checkpoint/job/manifest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <new>
#include <set>
#include <stdexcept>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "core/base/crc32c.h"
#include "core/base/descriptors.h"
#include "core/base/exception.h"
#include "core/base/status.h"
#include "core/checkpoint/job/json_text.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "distgrad checkpoint";
constexpr uint64_t kVersion = 1;

std::string SumText(uint32_t sum) { return absl::StrFormat("%08x", sum); }

// How the text ends.
std::string Ending(uint32_t sum) { return absl::StrCat("\"crc32c\": \"", SumText(sum), "\"\n}\n"); }

// Throws, as nlohmann's own do, for what is of another type.
uint32_t Sum(const Json& json) {
  const auto& text = json.get_ref<const std::string&>();
  uint32_t sum = 0;
  if (text.size() != 8 || !absl::SimpleHexAtoi(text, &sum)) {
    throw std::invalid_argument("no checksum");
  }
  return sum;
}

Json ValueToJson(const std::string& value) {
  if (IsUtf8(value)) return value;
  return {{"base64", absl::Base64Escape(value)}};
}
std::string ValueFromJson(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  std::string value;
  if (!absl::Base64Unescape(json.at("base64").get_ref<const std::string&>(), &value)) {
    throw std::invalid_argument("no base64");
  }
  return value;
}

// A name that stays in its folder, and is not one of ours that are no shards.
bool IsFileName(const std::string& name) {
  const auto may_be = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  return name.size() <= 255 && absl::EndsWith(name, ".safetensors") && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), may_be);
}

Json ToJson(const ManifestFile& file) {
  Json tensors = Json::object();
  for (const auto& [name, sum] : file.checksums.tensors) tensors[name] = SumText(sum);
  Json json = {{"name", file.name},
               {"size", file.checksums.size},
               {"header", SumText(file.checksums.header)},
               {"tensors", std::move(tensors)}};
  if (file.optimizer.has_value()) json["optimizer"] = *file.optimizer;
  return json;
}

ManifestFile FileFromJson(const Json& json) {
  ManifestFile file;
  file.name = json.at("name").get<std::string>();
  if (!IsFileName(file.name)) {
    throw std::invalid_argument("the name of a file is none of a shard");
  }
  file.checksums.size = Whole<uint64_t>(json.at("size"));
  file.checksums.header = Sum(json.at("header"));
  for (const auto& [name, sum] : json.at("tensors").get_ref<const Json::object_t&>()) {
    file.checksums.tensors[name] = Sum(sum);
  }
  if (json.contains("optimizer")) {
    file.optimizer = json["optimizer"].get<std::string>();
    if (!IsOptimizerName(*file.optimizer)) {
      throw std::invalid_argument("the name of an optimizer is none");
    }
  }
  return file;
}

ManifestWorker WorkerOf(const Json& json) {
  ManifestWorker worker;
  worker.name = json.at("name").get<std::string>();
  for (const auto& [name, value] : json.at("values").get_ref<const Json::object_t&>()) {
    worker.values[name] = ValueFromJson(value);
  }
  for (const Json& file : json.at("files").get_ref<const Json::array_t&>()) {
    worker.files.push_back(FileFromJson(file));
  }
  return worker;
}

absl::StatusOr<Manifest> ManifestOf(const Json& json) {
  // Not nlohmann's comparison with a text, which allocates and is noexcept.
  if (json.at("format").get_ref<const std::string&>() != kFormat) {
    return absl::InvalidArgumentError("it is of another format");
  }
  if (const uint64_t version = Whole<uint64_t>(json.at("version")); version != kVersion) {
    return absl::UnimplementedError(absl::StrCat("its version is ", version, ", and this program ",
                                                 "knows version ", kVersion,
                                                 ": a later distgrad has written it"));
  }
  Manifest manifest;
  manifest.step = Whole<int64_t>(json.at("step"));
  manifest.sequence = Whole<uint64_t>(json.at("sequence"));
  manifest.time = json.at("time").get<std::string>();
  std::set<std::string> workers, files;
  std::set<std::pair<std::string, std::string>>
      tensors;  // with "o" and the optimizer's name, or ""
  for (const Json& each : json.at("workers").get_ref<const Json::array_t&>()) {
    manifest.workers.push_back(WorkerOf(each));
    const ManifestWorker& worker = manifest.workers.back();
    if (!workers.insert(worker.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("it has the worker ", QuoteName(worker.name), " twice"));
    }
    for (const ManifestFile& file : worker.files) {
      if (!files.insert(file.name).second) {
        return absl::InvalidArgumentError(absl::StrCat("it has the file ", file.name, " twice"));
      }
      const std::string of =
          file.optimizer.has_value() ? absl::StrCat("o", *file.optimizer) : std::string();
      for (const auto& [name, sum] : file.checksums.tensors) {
        if (!tensors.emplace(of, name).second) {
          return absl::InvalidArgumentError(
              absl::StrCat("it has the tensor ", QuoteName(name), " twice"));
        }
      }
    }
  }
  return manifest;
}

// Of the exception that is being handled. What nlohmann says is "[json.exception.type_error.302]
// ...". A lack of memory says nothing about the manifest, and must not have it passed over as
// damaged.
absl::Status JsonStatus(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return StatusFromStdException(std::current_exception());
  }
  return absl::InvalidArgumentError(
      absl::StrCat("its JSON is not as it should be: ", error.what()));
}

}  // namespace

Json ToJson(const ManifestWorker& worker) {
  Json values = Json::object(), files = Json::array();
  for (const auto& [name, value] : worker.values) values[name] = ValueToJson(value);
  for (const ManifestFile& file : worker.files) files.push_back(ToJson(file));
  return {{"name", worker.name}, {"values", std::move(values)}, {"files", std::move(files)}};
}

absl::StatusOr<ManifestWorker> WorkerFromJson(const Json& json) {
  try {
    return WorkerOf(json);
  } catch (const std::exception& error) {
    return JsonStatus(error);
  }
}

absl::StatusOr<std::string> EncodeManifest(const Manifest& manifest) {
  Json workers = Json::array();
  for (const ManifestWorker& worker : manifest.workers) workers.push_back(ToJson(worker));
  const Json json = {{"format", kFormat},     {"version", kVersion},
                     {"step", manifest.step}, {"sequence", manifest.sequence},
                     {"time", manifest.time}, {"workers", std::move(workers)}};
  std::string text;
  try {
    text = json.dump(1);
  } catch (const Json::exception&) {
    return absl::InvalidArgumentError("the name of a worker, value or tensor is not UTF-8");
  }
  text.erase(text.size() - 2);  // "\n}"
  absl::StrAppend(&text, ",\n ");
  absl::StrAppend(&text, Ending(Crc32c(text)));
  if (text.size() > kMaxManifestBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the manifest would have ", text.size(),
                                                   " bytes, and may have ", kMaxManifestBytes));
  }
  return text;
}

bool IsOptimizerName(const std::string& name) {
  return name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
         });
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text) {
  const size_t ending = Ending(0).size();
  if (text.size() < ending) return absl::DataLossError("it is damaged: it has no checksum");
  const absl::string_view summed = text.substr(0, text.size() - ending);
  if (text.substr(summed.size()) != Ending(Crc32c(summed))) {
    return absl::DataLossError("it is damaged: its checksum is not that of its bytes");
  }
  DG_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  try {
    return ManifestOf(json);
  } catch (const std::exception& error) {
    return JsonStatus(error);
  }
}

absl::StatusOr<std::string> ReadManifestText(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("opening ", path));
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat is = {};
  std::string text;
  absl::Status status;
  if (fstat(fd, &is) != 0) {
    status = ErrnoStatus(errno, "stat");
  } else if (!S_ISREG(is.st_mode) || static_cast<uint64_t>(is.st_size) > kMaxManifestBytes) {
    status = absl::InvalidArgumentError("it is no file, or too large for a manifest");
  } else {
    text.resize(is.st_size);
    size_t have = 0;
    while (status.ok() && have < text.size()) {
      const ssize_t n = pread(fd, &text[have], text.size() - have, static_cast<off_t>(have));
      if (n > 0) {
        have += n;
      } else if (n == 0) {
        status = absl::DataLossError("the file has been cut while it was read");
      } else if (errno != EINTR) {
        status = ErrnoStatus(errno, "read");
      }
    }
  }
  if (!status.ok()) return Annotate(status, absl::StrCat("reading ", path));
  return text;
}

bool IsDamage(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsInvalidArgument(status);
}

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  DG_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(folder));
  absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (manifest.ok()) return manifest;
  return Annotate(manifest.status(), absl::StrCat("reading ", folder, "/", kManifestName));
}

}  // namespace distgrad
