// The manifest of a checkpoint, with a checksum that is right whatever the rest is.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/check.h"
#include "core/base/crc32c.h"
#include "core/checkpoint/job/manifest.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

// All but the last entry, which the target appends; so it ends with a comma.
std::string Unsigned(const Manifest& manifest) {
  const absl::StatusOr<std::string> text = EncodeManifest(manifest);
  DG_CHECK(text.ok()) << text.status();
  return text->substr(0, text->rfind(',') + 1);
}

}  // namespace

// What was taken names files within its folder, and is written and read as the same.
bool ReadHostile(absl::string_view bytes) {
  const absl::StatusOr<Manifest> manifest =
      ParseManifest(absl::StrFormat("%s\"crc32c\": \"%08x\"\n}\n", bytes, Crc32c(bytes)));
  if (!manifest.ok()) return false;
  for (const ManifestWorker& worker : manifest->workers) {
    for (const ManifestFile& file : worker.files) {
      DG_CHECK(!absl::StrContains(file.name, "/") && !absl::StartsWith(file.name, "."));
    }
  }
  const absl::StatusOr<std::string> text = EncodeManifest(*manifest);
  DG_CHECK(text.ok()) << text.status();
  const absl::StatusOr<Manifest> same = ParseManifest(*text);
  DG_CHECK(same.ok()) << same.status();
  DG_CHECK(*EncodeManifest(*same) == *text);
  return true;
}

std::vector<std::string> GoodInputs() {
  Manifest manifest{120, 7, "2026-01-02T03:04:05Z", {}};
  manifest.workers.push_back(
      {"front", {{"epoch", "3"}, {"generator", "\xff"}}, {{"a.safetensors", "sgd", {9, 1, {}}}}});
  manifest.workers.push_back({"back", {}, {{"b.safetensors", std::nullopt, {99, 2, {{"x", 3}}}}}});
  return {Unsigned(manifest), Unsigned({})};
}

}  // namespace distgrad
