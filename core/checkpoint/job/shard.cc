// Compares a file with what the manifest says of it.
#include "core/checkpoint/job/shard.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace distgrad {

absl::StatusOr<SafetensorsFile> OpenShard(const std::string& folder, const ManifestFile& file) {
  absl::StatusOr<SafetensorsFile> opened =
      SafetensorsFile::Open(absl::StrCat(folder, "/", file.name));
  if (!opened.ok()) {
    if (!IsDamage(opened.status()) && !absl::IsNotFound(opened.status())) return opened.status();
    return absl::DataLossError(absl::StrCat("it is damaged: ", opened.status().message()));
  }
  const SafetensorsChecksums& saved = file.checksums;
  if (opened->size() != saved.size) {
    return DamagedShard(
        folder, file,
        absl::StrCat(opened->size(), " bytes, not the ", saved.size, " that were saved"));
  }
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto& has = opened->header().tensors;
  if (opened->header_checksum() != saved.header ||
      !std::equal(has.begin(), has.end(), saved.tensors.begin(), saved.tensors.end(), same_name)) {
    return DamagedShard(folder, file, "another header than was saved");
  }
  return opened;
}

absl::Status DamagedShard(const std::string& folder, const ManifestFile& file,
                          absl::string_view what) {
  return absl::DataLossError(
      absl::StrCat("it is damaged: ", folder, "/", file.name, " has ", what));
}

}  // namespace distgrad
