// A safetensors file: its header, and all of its tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/safetensors_header.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

// A file in memory, and its path.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("safetensors", MFD_CLOEXEC)) { DG_CHECK(fd_ >= 0); }
  ~MemoryFile() { close(fd_); }

  void Put(absl::string_view bytes) const {
    DG_CHECK(write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", fd_); }

 private:
  const int fd_;
};

std::string File(const TensorMap& tensors, const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header;
  header.metadata = metadata;
  for (const auto& [name, tensor] : tensors) {
    header.tensors[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  }
  const absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors(&header);
  DG_CHECK(layout.ok()) << layout.status();
  std::string file = layout->header;
  for (const std::string* name : layout->order) {
    const at::Tensor& tensor = tensors.at(*name);
    file.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return file;
}

}  // namespace

// The tensors are all of the file and nobody else's, and what was taken can be written and is read
// as the same. A tensor may still be refused for what its bytes are.
bool ReadHostile(absl::string_view bytes) {
  const MemoryFile memory;
  memory.Put(bytes);
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(memory.path());
  if (!file.ok()) return false;
  uint64_t size = 0;
  for (const auto& [name, info] : file->header().tensors) {
    const absl::StatusOr<at::Tensor> tensor = file->Read(name);
    DG_CHECK(tensor.ok() || info.dtype == at::kBool) << tensor.status();
    size += info.end - info.begin;
    if (!tensor.ok()) continue;
    DG_CHECK(tensor->scalar_type() == info.dtype && tensor->sizes() == at::IntArrayRef(info.shape));
    DG_CHECK(tensor->nbytes() == info.end - info.begin);
  }
  DG_CHECK(size < bytes.size());
  SafetensorsHeader copy = file->header();
  const absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors(&copy);
  DG_CHECK(layout.ok()) << layout.status();
  const absl::StatusOr<SafetensorsHeader> same =
      ParseSafetensorsHeader(absl::string_view(layout->header).substr(8), size);
  DG_CHECK(same.ok()) << same.status();
  DG_CHECK(same->metadata == copy.metadata && same->tensors.size() == copy.tensors.size());
  for (const auto& [name, info] : same->tensors) {
    const SafetensorsInfo& was = file->header().tensors.at(name);
    DG_CHECK(info.dtype == was.dtype && info.shape == was.shape);
  }
  return true;
}

std::vector<std::string> GoodInputs() {
  return {
      File({{"fc.weight", at::ones({2, 3})}, {"fc.bias", at::ones({2}, at::kBFloat16)}}, {}),
      File({{"step", at::ones({}, at::kLong)},
            {"mask", at::ones({3}, at::kBool)},
            {"none", at::ones({0, 4})},
            {"", at::arange(4, at::kByte).view(at::kFloat4_e2m1fn_x2)}},
           {{"format", "pt"}, {"a\"\n", "\u00e9"}}),
      File({{"c", at::ones({1, 1}, at::kComplexFloat)}, {"h", at::ones({1}, at::kHalf)}}, {}),
  };
}

}  // namespace distgrad
