// The manifest of a checkpoint: what makes a folder of files the state of a whole job at one step.
//
// It is JSON, and its last entry is the CRC-32C of all before that, so that no byte of it can be
// damaged unnoticed. Of each file it has the size and the checksums, which are of all its bytes.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_MANIFEST_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_MANIFEST_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/checkpoint/safetensors.h"
#include "nlohmann/json_fwd.hpp"

namespace distgrad {

struct ManifestFile {
  std::string name;                      // in the folder of the manifest
  std::optional<std::string> optimizer;  // whose state it has; none: parameters and buffers
  SafetensorsChecksums checksums;
};

// The entry of one worker: what it has saved.
struct ManifestWorker {
  std::string name;
  std::map<std::string, std::string> values;
  std::vector<ManifestFile> files;
};

struct Manifest {
  int64_t step = 0;
  // Each checkpoint that a folder gets has a greater one than those that are there.
  uint64_t sequence = 0;
  std::string time;  // for people
  std::vector<ManifestWorker> workers;
};

constexpr char kManifestName[] = "manifest.json";
constexpr uint64_t kMaxManifestBytes = 256 << 20;

// kInvalidArgument for names that are not UTF-8. Values may be any bytes.
absl::StatusOr<std::string> EncodeManifest(const Manifest& manifest);

// Whether it is letters, digits, '_' and '-', and not many, as names of optimizers are.
bool IsOptimizerName(const std::string& name);

// What is read may come from anybody: afterwards files are names within their folder, optimizers
// have names that they can have, and no two files have a tensor of one name, but for those of
// different optimizers. kDataLoss unless the checksum is right; kUnimplemented for a later version;
// else kInvalidArgument.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text);

// From the file of a folder; errors name it. kNotFound if there is none.
absl::StatusOr<std::string> ReadManifestText(const std::string& folder);
absl::StatusOr<Manifest> ReadManifest(const std::string& folder);

// Whether an error of reading a file of a checkpoint says that its bytes are wrong. Else they have
// not been seen, by what the operating system says, or are of a later version: they may be good.
bool IsDamage(const absl::Status& status);

// For the messages of a save and a load, which are JSON too:

nlohmann::json ToJson(const ManifestWorker& worker);
absl::StatusOr<ManifestWorker> WorkerFromJson(const nlohmann::json& json);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_MANIFEST_H_
