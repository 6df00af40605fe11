// Moves elements between tensors and a file, in pieces where a copy is needed. It reads with pread:
// where a file that is mapped into memory gets shorter, the process gets SIGBUS.
#include "core/checkpoint/safetensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "core/base/crc32c.h"
#include "core/base/descriptors.h"
#include "core/base/error_list.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/checkpoint/durable_file.h"
#include "core/checkpoint/row_major.h"
#include "core/checkpoint/shared_memory.h"
#include "core/tensor/exception.h"
#include "core/tensor/extent.h"

namespace distgrad {
namespace {

// Of what is summed up while it is written or read.
constexpr size_t kSummedBytes = 256 << 10;

// Writes to a file and sums up what it writes, while that is in the processor's cache. For one
// thread.
class SummingWriter {
 public:
  SummingWriter(DurableFile* file, const SafetensorsSaveOptions& options)
      : file_(file), options_(options) {}

  absl::Status Write(absl::string_view bytes) {
    while (!bytes.empty()) {
      const absl::string_view piece = bytes.substr(0, kSummedBytes);
      bytes.remove_prefix(piece.size());
      if (options_.check != nullptr) DG_RETURN_IF_ERROR(options_.check());
      if (options_.checksums != nullptr) sum_ = Crc32c(piece, sum_);
      DG_RETURN_IF_ERROR(file_->Write(piece));
      size_ += piece.size();
    }
    return absl::OkStatus();
  }

  uint64_t size() const { return size_; }
  // Of what was written since it was last asked for.
  uint32_t TakeSum() { return std::exchange(sum_, 0); }

 private:
  DurableFile* const file_;
  const SafetensorsSaveOptions& options_;
  uint64_t size_ = 0;
  uint32_t sum_ = 0;
};

// kInvalidArgument if one of these elements is neither 0 nor 1: whoever computes with it may do
// anything. Quick where none is.
absl::Status CheckBools(absl::string_view bytes) {
  unsigned char bits = 0;
  for (const char byte : bytes) bits |= static_cast<unsigned char>(byte);
  if (bits <= 1) return absl::OkStatus();
  const auto is_bad = [](char byte) { return byte != 0 && byte != 1; };
  const char bad = *std::find_if(bytes.begin(), bytes.end(), is_bad);
  return absl::InvalidArgumentError(
      absl::StrCat("it is BOOL and has a byte ", static_cast<unsigned char>(bad)));
}

// The beginning of a file, and the names of its tensors in the order of the file, which are those
// of the map.
struct LaidOut {
  std::string header;
  std::vector<const std::string*> order;
};

absl::StatusOr<LaidOut> LayOut(const TensorMap& tensors,
                               const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header;
  header.metadata = metadata;
  for (const auto& [name, tensor] : tensors) {
    const auto refuse = [name = &name](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat(QuoteName(*name), " ", what));
    };
    if (!tensor.defined()) return refuse("is no tensor");
    if (tensor.is_nested()) return refuse("is not dense: see Tensor::unbind()");
    if (tensor.layout() != at::kStrided) return refuse("is not dense: see Tensor::to_dense()");
    if (tensor.is_meta()) return refuse("is on the device \"meta\" and has no elements");
    if (!IsInMemory(tensor)) return refuse("has elements that are not in its memory");
    header.tensors[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  }
  DG_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors(&header));
  LaidOut laid_out{std::move(layout.header), {}};
  for (const std::string* name : layout.order) {
    laid_out.order.push_back(&tensors.find(*name)->first);
  }
  return laid_out;
}

std::string TypeText(at::ScalarType dtype, at::IntArrayRef shape) {
  return absl::StrCat("dtype ", c10::toString(dtype), " and shape [", absl::StrJoin(shape, ", "),
                      "]");
}

// What keeps a tensor from taking what is in a file, or "".
std::string MismatchOf(const SafetensorsInfo& info, const at::Tensor& tensor) {
  if (!tensor.defined()) return "is no tensor here";
  // Of a nested one there is no shape, and to ask for it throws.
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return "is not dense here";
  if (tensor.is_meta()) return "is on the device \"meta\" here, and has no elements";
  if (tensor.scalar_type() != info.dtype || tensor.sizes() != at::IntArrayRef(info.shape)) {
    return absl::StrCat("has ", TypeText(info.dtype, info.shape), " in the file, and here ",
                        TypeText(tensor.scalar_type(), tensor.sizes()));
  }
  if (!IsInMemory(tensor)) return "has elements here that are not in its memory";
  if (MayOverlapItself(tensor)) {
    return "has elements here that are one in memory";
  }
  return "";
}

absl::Status Save(const TensorMap& tensors, const std::string& path,
                  const std::map<std::string, std::string>& metadata,
                  const SafetensorsSaveOptions& options) {
  const absl::StatusOr<LaidOut> layout = LayOut(tensors, metadata);
  if (!layout.ok()) return Annotate(layout.status(), absl::StrCat("saving ", path));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<DurableFile> file,
                      DurableFile::Create(path, options.calls));
  SafetensorsChecksums checksums;
  SummingWriter writer(file.get(), options);
  DG_RETURN_IF_ERROR(writer.Write(layout->header));
  checksums.header = writer.TakeSum();
  for (const std::string* name : layout->order) {
    const at::Tensor& tensor = tensors.at(*name);
    const bool is_bool = tensor.scalar_type() == at::kBool;
    DG_RETURN_IF_ERROR(ForEachPiece(tensor, [&](absl::string_view bytes) {
      // No load would take it.
      const absl::Status good = is_bool ? CheckBools(bytes) : absl::OkStatus();
      if (good.ok()) return writer.Write(bytes);
      return Annotate(Annotate(good, QuoteName(*name)), absl::StrCat("saving ", path));
    }));
    checksums.tensors[*name] = writer.TakeSum();
  }
  checksums.size = writer.size();
  if (options.checksums != nullptr) *options.checksums = std::move(checksums);
  return file->Commit();
}

absl::Status LoadInto(const SafetensorsFile& file, const std::string& path,
                      const TensorMap& tensors) {
  ErrorList errors;
  const auto complain = [&](const std::string& name, absl::string_view what) {
    errors.Add(absl::StrCat(QuoteName(name), " ", what));
  };
  for (const auto& [name, tensor] : tensors) {
    const std::string mismatch = file.Mismatch(name, tensor);
    if (!mismatch.empty()) complain(name, mismatch);
  }
  for (const auto& [name, info] : file.header().tensors) {
    if (tensors.count(name) == 0) complain(name, "is unexpected");
  }
  if (errors.empty()) {
    const auto conflicts = FindConflicts(
        tensors, [&](const std::string& name) { return file.Checksum(name); },
        [&](const std::string& name) { return file.Read(name); });
    if (!conflicts.ok()) return Annotate(conflicts.status(), absl::StrCat("loading ", path));
    for (const auto& [name, why] : *conflicts) complain(name, why);
  }
  if (!errors.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " does not fit: ", errors.Text()));
  }
  for (const auto& [name, tensor] : tensors) DG_RETURN_IF_ERROR(file.ReadInto(name, tensor));
  return absl::OkStatus();
}

}  // namespace

absl::Status SaveSafetensors(const TensorMap& tensors, const std::string& path,
                             const std::map<std::string, std::string>& metadata,
                             const SafetensorsSaveOptions& options) {
  try {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    return Save(tensors, path, metadata, options);
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), absl::StrCat("saving ", path));
  }
}

absl::Status CheckSafetensors(const TensorMap& tensors,
                              const std::map<std::string, std::string>& metadata) {
  try {
    return LayOut(tensors, metadata).status();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("\"", path, "\" is no name of a file"));
  }
  SafetensorsFile file(path, -1);  // which closes it, whatever is thrown
  // A pipe would make it wait.
  file.fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) return ErrnoStatus(errno, absl::StrCat("opening ", path));
  absl::Status read;
  try {
    read = file.ReadHeader();
  } catch (...) {
    read = StatusFromException(std::current_exception());  // memory for the header
  }
  if (!read.ok()) return Annotate(read, absl::StrCat("reading ", path));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      data_(other.data_),
      header_checksum_(other.header_checksum_),
      header_(std::move(other.header_)) {}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsFile::ReadHeader() {
  struct stat is = {};
  if (fstat(fd_, &is) != 0) return ErrnoStatus(errno, "stat");
  if (!S_ISREG(is.st_mode)) return absl::InvalidArgumentError("it is no file");
  const uint64_t size = static_cast<uint64_t>(is.st_size);
  if (size < kSafetensorsLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", size, " bytes, and a safetensors file at least 10"));
  }
  char length[kSafetensorsLengthBytes];
  DG_RETURN_IF_ERROR(ReadBytes(0, length, sizeof(length)));
  const uint64_t header = WireReader(absl::string_view(length, sizeof(length))).U64();
  const uint64_t rest = size - kSafetensorsLengthBytes;
  if (header > kMaxSafetensorsHeaderBytes || header > rest) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it is no safetensors file, or a damaged one: it begins with a header's length of ", header,
        " bytes, and ", rest, " bytes follow (and a header has at most ",
        kMaxSafetensorsHeaderBytes, ")"));
  }
  std::string json(header, '\0');
  DG_RETURN_IF_ERROR(ReadBytes(kSafetensorsLengthBytes, json.data(), json.size()));
  DG_ASSIGN_OR_RETURN(header_, ParseSafetensorsHeader(json, rest - header));
  size_ = size;
  data_ = kSafetensorsLengthBytes + header;
  header_checksum_ = Crc32c(json, Crc32c(absl::string_view(length, sizeof(length))));
  return absl::OkStatus();
}

absl::StatusOr<const SafetensorsInfo*> SafetensorsFile::Find(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) {
    return absl::NotFoundError(absl::StrCat(path_, " has no tensor ", QuoteName(name)));
  }
  return &found->second;
}

absl::Status SafetensorsFile::Annotated(const absl::Status& status, const std::string& name) const {
  return Annotate(status, absl::StrCat("reading ", QuoteName(name), " from ", path_));
}

absl::Status SafetensorsFile::ReadBytes(uint64_t offset, void* data, uint64_t size) const {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = pread(fd_, to, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "read");
    if (n == 0) return absl::DataLossError("the file has been cut since it was opened");
    to += n;
    offset += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFile::ReadRowMajor(uint64_t offset, const at::Tensor& tensor) const {
  if (tensor.numel() == 0) return absl::OkStatus();
  const bool is_bool = tensor.scalar_type() == at::kBool;
  if (IsPlain(tensor) && !is_bool) {
    return ReadBytes(offset, tensor.mutable_data_ptr(), tensor.nbytes());
  }
  if (static_cast<int64_t>(tensor.nbytes()) > kRowMajorPieceBytes) {
    return ForEachPart(tensor, [&](const at::Tensor& part, uint64_t before) {
      return ReadRowMajor(offset + before, part);
    });
  }
  const at::Tensor to = AsBits(tensor);
  const at::Tensor piece = at::empty(to.sizes(), at::dtype(to.scalar_type()).device(at::kCPU));
  DG_RETURN_IF_ERROR(ReadBytes(offset, piece.mutable_data_ptr(), piece.nbytes()));
  if (is_bool) DG_RETURN_IF_ERROR(CheckBools(BytesOf(piece)));
  to.copy_(piece);
  return absl::OkStatus();
}

std::string SafetensorsFile::Mismatch(const std::string& name, const at::Tensor& tensor) const {
  const absl::StatusOr<const SafetensorsInfo*> info = Find(name);
  return info.ok() ? MismatchOf(**info, tensor) : "is missing";
}

absl::StatusOr<uint32_t> SafetensorsFile::Checksum(
    const std::string& name, const std::function<absl::Status()>& check) const {
  DG_ASSIGN_OR_RETURN(const SafetensorsInfo* const info, Find(name));
  std::string piece(std::min<uint64_t>(info->end - info->begin, kSummedBytes), '\0');
  uint32_t sum = 0;
  for (uint64_t at = info->begin; at < info->end; at += piece.size()) {
    if (check != nullptr) DG_RETURN_IF_ERROR(check());
    piece.resize(std::min<uint64_t>(info->end - at, kSummedBytes));
    absl::Status read = ReadBytes(data_ + at, piece.data(), piece.size());
    if (read.ok() && info->dtype == at::kBool) read = CheckBools(piece);
    DG_RETURN_IF_ERROR(Annotated(read, name));
    sum = Crc32c(piece, sum);
  }
  return sum;
}

absl::StatusOr<at::Tensor> SafetensorsFile::Read(const std::string& name) const {
  DG_ASSIGN_OR_RETURN(const SafetensorsInfo* const info, Find(name));
  at::Tensor tensor;
  absl::Status read;
  try {
    const c10::InferenceMode no_inference(false);
    tensor = at::empty(info->shape, at::dtype(info->dtype).device(at::kCPU));
    read = ReadRowMajor(data_ + info->begin, tensor);
  } catch (...) {
    read = StatusFromException(std::current_exception());
  }
  if (!read.ok()) return Annotated(read, name);
  return tensor;
}

absl::Status SafetensorsFile::ReadInto(const std::string& name, const at::Tensor& tensor) const {
  DG_ASSIGN_OR_RETURN(const SafetensorsInfo* const info, Find(name));
  absl::Status read;
  try {
    const std::string mismatch = MismatchOf(*info, tensor);
    if (!mismatch.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("reading ", path_, ": ", QuoteName(name), " ", mismatch));
    }
    // libtorch lets nobody write to an inference tensor outside of that mode.
    const c10::InferenceMode inference(tensor.is_inference());
    const at::NoGradGuard no_grad;
    read = ReadRowMajor(data_ + info->begin, tensor);
    // What autograd has saved of it is not what it was.
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  } catch (...) {
    read = StatusFromException(std::current_exception());
  }
  return Annotated(read, name);
}

absl::StatusOr<TensorMap> LoadSafetensors(const std::string& path) {
  DG_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  TensorMap tensors;
  for (const auto& [name, info] : file.header().tensors) {
    DG_ASSIGN_OR_RETURN(tensors[name], file.Read(name));
  }
  return tensors;
}

absl::Status LoadSafetensorsInto(const std::string& path, const TensorMap& tensors) {
  DG_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  try {
    return LoadInto(file, path, tensors);
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), absl::StrCat("loading ", path));
  }
}

}  // namespace distgrad
