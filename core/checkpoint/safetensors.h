// Tensors in safetensors files, as Python's `safetensors` and whatever builds on it read and write
// them.
//
//   absl::Status saved = SaveSafetensors({{"fc.weight", weight}}, "model.safetensors");
//   absl::StatusOr<TensorMap> tensors = LoadSafetensors("model.safetensors");
//
// docs/checkpoints.md says what a file has of a tensor, and what not.
#ifndef DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_H_
#define DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/safetensors_header.h"

namespace distgrad {

class FileCalls;  // durable_file.h

// Tensors by name.
using TensorMap = std::map<std::string, at::Tensor>;

// What a file is to be, for its later reader: its size, and the CRC-32C (core/base/crc32c.h) of its
// header and of each tensor. Together these are all bytes of it.
struct SafetensorsChecksums {
  uint64_t size = 0;
  uint32_t header = 0;
  std::map<std::string, uint32_t> tensors;
};

struct SafetensorsSaveOptions {
  // The place for the checksums of what is written. Null: none.
  SafetensorsChecksums* checksums = nullptr;
  // Is asked now and then; what is not OK ends the save, with that. Null: nothing is asked.
  std::function<absl::Status()> check = nullptr;
  // The calls of DurableFile.
  FileCalls* calls = nullptr;
};

// Writes the tensors, of whichever devices, and the metadata to a file: all or nothing, and when it
// has returned on the disk (durable_file.h). Tensors that are contiguous and on the CPU are written
// from where they are; of others at most 16 MiB at a time are copied. They must not change
// meanwhile. Those that share memory are each written in full. kInvalidArgument for tensors that
// are sparse, or of a dtype that the format lacks, and for a BOOL that is neither 0 nor 1; errors
// of the file as of DurableFile. All errors name the file.
absl::Status SaveSafetensors(const TensorMap& tensors, const std::string& path,
                             const std::map<std::string, std::string>& metadata = {},
                             const SafetensorsSaveOptions& options = {});

// Returns the error that SaveSafetensors() has for these before it touches any file: of a name or
// metadata that are not UTF-8, say. Looks at no element.
absl::Status CheckSafetensors(const TensorMap& tensors,
                              const std::map<std::string, std::string>& metadata = {});

// A file that is open, as Python's safe_open: its header is in memory, and each tensor is read when
// it is asked for. It stays the same file if another one takes its name. Thread-safe, but for
// moves.
class SafetensorsFile {
 public:
  // Reads the header. kInvalidArgument if it is no such file, or a damaged one; else errors of the
  // operating system. These and all below name the file and the tensor.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  ~SafetensorsFile();

  const SafetensorsHeader& header() const { return header_; }
  uint64_t size() const { return size_; }
  // CRC-32C of all in front of the tensors; and, which reads it, of a tensor, with the errors of
  // Read(). `check` is as of SafetensorsSaveOptions.
  uint32_t header_checksum() const { return header_checksum_; }
  absl::StatusOr<uint32_t> Checksum(const std::string& name,
                                    const std::function<absl::Status()>& check = nullptr) const;

  // Returns what keeps a tensor from taking the one of that name, for people; "" if nothing does.
  std::string Mismatch(const std::string& name, const at::Tensor& tensor) const;

  // Reads a tensor, on the CPU. kNotFound if there is none of that name; kDataLoss if the file has
  // become shorter since it was opened; kInvalidArgument for a BOOL that is neither 0 nor 1.
  absl::StatusOr<at::Tensor> Read(const std::string& name) const;

  // Writes to a tensor, on any device and with any strides. kInvalidArgument, and nothing is
  // written, unless it has the dtype and shape of the one in the file. After other errors some of
  // it may have been written. It may be a parameter: autograd does not see it.
  absl::Status ReadInto(const std::string& name, const at::Tensor& tensor) const;

 private:
  SafetensorsFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  absl::Status ReadHeader();
  absl::StatusOr<const SafetensorsInfo*> Find(const std::string& name) const;
  absl::Status ReadBytes(uint64_t offset, void* data, uint64_t size) const;
  // Reads all of a tensor, whose elements begin there.
  absl::Status ReadRowMajor(uint64_t offset, const at::Tensor& tensor) const;
  absl::Status Annotated(const absl::Status& status, const std::string& name) const;

  std::string path_;
  int fd_;
  uint64_t size_ = 0;
  uint64_t data_ = 0;  // where the header ends
  uint32_t header_checksum_ = 0;
  SafetensorsHeader header_;
};

// All tensors of a file, on the CPU.
absl::StatusOr<TensorMap> LoadSafetensors(const std::string& path);

// Writes what is in a file to these tensors, as SafetensorsFile::ReadInto. kInvalidArgument, and
// nothing is written, lists what is missing in the file, what is unexpected in it, and what has
// another dtype or shape, or shares memory with another tensor, and not its values
// (shared_memory.h).
absl::Status LoadSafetensorsInto(const std::string& path, const TensorMap& tensors);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_SAFETENSORS_H_
