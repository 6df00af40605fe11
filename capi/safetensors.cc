// Files of tensors: writing them, reading them whole, and opening them.
#include "core/checkpoint/safetensors.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/tensor_map.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/checkpoint/safetensors_header.h"

namespace distgrad {
namespace {

struct SafetensorsFileObject : HandleObject {
  using Handle = dg_safetensors_file;
  static constexpr HandleKind kKind = HandleKind::kSafetensorsFile;
  static constexpr char kName[] = "dg_safetensors_file";

  explicit SafetensorsFileObject(SafetensorsFile file) : file(std::move(file)) {}
  const SafetensorsFile file;  // thread-safe
};

absl::StatusOr<std::map<std::string, std::string>> ToMetadata(const dg_entry* entries,
                                                              size_t count) {
  DG_RETURN_IF_ERROR(CheckArray(entries, count, "metadata"));
  std::map<std::string, std::string> metadata;
  for (size_t i = 0; i < count; ++i) {
    DG_ASSIGN_OR_RETURN(std::string name, FromStr(entries[i].name, "a name of metadata"));
    DG_ASSIGN_OR_RETURN(std::string value, FromStr(entries[i].value, "a value of metadata"));
    const auto [at, is_new] = metadata.emplace(std::move(name), std::move(value));
    if (is_new) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the metadata ", QuoteName(at->first), " is there twice"));
  }
  return metadata;
}

}  // namespace

absl::StatusOr<TensorMap> PinTensorMap(const dg_str* names, const dg_tensor* const* tensors,
                                       size_t count, absl::string_view of_tensors,
                                       absl::string_view of_names) {
  DG_ASSIGN_OR_RETURN(std::vector<std::string> texts, FromStrs(names, count, of_names));
  DG_ASSIGN_OR_RETURN(std::vector<at::Tensor> pinned,
                      PinTensors(tensors, count, /*allow_null=*/false, of_tensors));
  TensorMap map;
  for (size_t i = 0; i < count; ++i) {
    const auto [at, is_new] = map.emplace(std::move(texts[i]), std::move(pinned[i]));
    if (is_new) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the name ", QuoteName(at->first), " is there twice"));
  }
  return map;
}

}  // namespace distgrad

using namespace distgrad;

extern "C" {

dg_error* dg_safetensors_save(dg_str path, const dg_str* names, const dg_tensor* const* tensors,
                              size_t count, const dg_entry* metadata,
                              size_t metadata_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(path, "path"));
    DG_ASSIGN_OR_RETURN(const TensorMap named, PinTensorMap(names, tensors, count, "tensors"));
    DG_ASSIGN_OR_RETURN(const auto entries, ToMetadata(metadata, metadata_count));
    const BlockingScope blocking;
    return SaveSafetensors(named, text, entries);
  });
}

dg_error* dg_safetensors_load(dg_str path,
                              void (*visit)(void* user_data, dg_str name, const dg_tensor* tensor),
                              void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(path, "path"));
    TensorMap tensors;
    {
      const BlockingScope blocking;
      DG_ASSIGN_OR_RETURN(tensors, LoadSafetensors(text));
    }
    std::vector<OwnedHandle<TensorObject>> handles;
    for (const auto& [name, tensor] : tensors) {
      handles.push_back(NewOwnedHandle<TensorObject>(tensor));
    }
    size_t i = 0;
    for (const auto& [name, tensor] : tensors) visit(user_data, ToStr(name), handles[i++].get());
    return absl::OkStatus();
  });
}

dg_error* dg_safetensors_load_into(dg_str path, const dg_str* names,
                                   const dg_tensor* const* tensors, size_t count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(path, "path"));
    DG_ASSIGN_OR_RETURN(const TensorMap named, PinTensorMap(names, tensors, count, "tensors"));
    const BlockingScope blocking;
    return LoadSafetensorsInto(text, named);
  });
}

dg_error* dg_safetensors_file_open(dg_str path, dg_safetensors_file** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(path, "path"));
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(text));
    *out = NewHandle<SafetensorsFileObject>(std::move(file));
    return absl::OkStatus();
  });
}

dg_error* dg_safetensors_file_tensors(const dg_safetensors_file* file,
                                      void (*visit)(void* user_data,
                                                    const dg_safetensors_info* info),
                                      void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_ASSIGN_OR_RETURN(const Pinned<SafetensorsFileObject> pinned,
                        Pin<SafetensorsFileObject>(file, "file"));
    for (const auto& [name, info] : pinned->file.header().tensors) {
      const dg_safetensors_info seen = {.struct_size = sizeof(dg_safetensors_info),
                                        .name = ToStr(name),
                                        .dtype = static_cast<int64_t>(info.dtype),
                                        .shape = info.shape.data(),
                                        .dim_count = info.shape.size(),
                                        .bytes = info.end - info.begin};
      visit(user_data, &seen);
    }
    return absl::OkStatus();
  });
}

dg_error* dg_safetensors_file_metadata(const dg_safetensors_file* file,
                                       void (*visit)(void* user_data, const dg_entry* entry),
                                       void* user_data) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckCallback(visit != nullptr, "visit"));
    DG_ASSIGN_OR_RETURN(const Pinned<SafetensorsFileObject> pinned,
                        Pin<SafetensorsFileObject>(file, "file"));
    for (const auto& [name, value] : pinned->file.header().metadata) {
      const dg_entry entry = {ToStr(name), ToStr(value)};
      visit(user_data, &entry);
    }
    return absl::OkStatus();
  });
}

dg_error* dg_safetensors_file_read(const dg_safetensors_file* file, dg_str name,
                                   dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<SafetensorsFileObject> pinned,
                        Pin<SafetensorsFileObject>(file, "file"));
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(name, "name"));
    const BlockingScope blocking;
    DG_ASSIGN_OR_RETURN(const at::Tensor tensor, pinned->file.Read(text));
    *out = NewTensorHandle(tensor);
    return absl::OkStatus();
  });
}

dg_error* dg_safetensors_file_read_into(const dg_safetensors_file* file, dg_str name,
                                        const dg_tensor* tensor) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<SafetensorsFileObject> pinned,
                        Pin<SafetensorsFileObject>(file, "file"));
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(name, "name"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> to, Pin<TensorObject>(tensor, "tensor"));
    const BlockingScope blocking;
    return pinned->file.ReadInto(text, to->tensor);
  });
}

void dg_safetensors_file_destroy(dg_safetensors_file* file) noexcept {
  DestroyHandle<SafetensorsFileObject>(file);
}

}  // extern "C"
