// The header of a safetensors file: its tensors, with their dtypes, shapes and places.
//
// The format (github.com/huggingface/safetensors): 8 bytes with the length of the header, the
// header in JSON, and then the elements of all tensors, in row-major order, each tensor's right
// behind another's. The header is an object of
//
//   "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
//
// for each tensor, and perhaps "__metadata__", an object of strings. What is read may come from
// anywhere: of a header that was taken, all that this file says is so.
#ifndef DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_HEADER_H_
#define DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_HEADER_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// A tensor in a file.
struct SafetensorsInfo {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  // The shape as libtorch has it. (The format counts both halves of a byte of dtype F4 and libtorch
  // the bytes: in the file the last dimension is twice as long.)
  std::vector<int64_t> shape;
  // Its bytes, counted from the end of the header. There are as many as dtype and shape say.
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsInfo> tensors;
  std::map<std::string, std::string> metadata;
};

// The length in front of the header, and the most bytes that the header may have: 100 MB, which is
// also the bound of the Python package.
constexpr uint64_t kSafetensorsLengthBytes = 8;
constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// libtorch's operators go up to here.
constexpr size_t kMaxSafetensorsDimensions = 64;

// Returns kInvalidArgument, with the name of the tensor and what is wrong with it: for JSON that is
// no such header or says a thing twice, for unknown dtypes and keys, for shapes whose bytes
// overflow, and unless the tensors' bytes are all of the `data_bytes` behind the header, without
// holes or overlaps.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_bytes);

// The beginning of a file, and what follows it.
struct SafetensorsLayout {
  std::string header;                     // its length and itself, padded to a multiple of 8 bytes
  std::vector<const std::string*> order;  // the names of the tensors, as keys of `header->tensors`
};

// Gives each tensor of `header` its place, in the order of the Python package: large dtypes first,
// so that all are aligned, and by name within a dtype. The same tensors make the same file.
// kInvalidArgument for a dtype that the format lacks, for names or metadata that are not UTF-8, and
// for more than a header may have.
absl::StatusOr<SafetensorsLayout> LayOutSafetensors(SafetensorsHeader* header);

// The format's name of a dtype, as "BF16"; empty for one that the format lacks.
absl::string_view SafetensorsDtype(c10::ScalarType dtype);

// Returns a name from anywhere for an error: in quotation marks, escaped, and not longer than a
// line.
std::string QuoteName(absl::string_view name);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_HEADER_H_
