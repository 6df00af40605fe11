// The files of a checkpoint, as its manifest has them.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_SHARD_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_SHARD_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/safetensors.h"

namespace distgrad {

// Opens a file of the checkpoint in that folder. kDataLoss unless it is there, and its size, its
// header, and so the names of its tensors, are what the manifest says; the tensors' bytes are not
// read. What the operating system says of a file that cannot be read is another error.
absl::StatusOr<SafetensorsFile> OpenShard(const std::string& folder, const ManifestFile& file);

// That a file is damaged, and how: "has ...".
absl::Status DamagedShard(const std::string& folder, const ManifestFile& file,
                          absl::string_view what);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_SHARD_H_
