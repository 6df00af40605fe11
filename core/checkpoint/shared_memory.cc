// Looks for bytes that several tensors have, and tries the loads of these in a copy of their
// memory.
#include "core/checkpoint/shared_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/status.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/tensor/exception.h"
#include "core/tensor/extent.h"

namespace distgrad {
namespace {

using Device = std::pair<c10::DeviceType, c10::DeviceIndex>;

Device DeviceOf(const at::Tensor& tensor) {
  return {tensor.device().type(), tensor.is_cpu() ? c10::DeviceIndex{0} : tensor.device().index()};
}

// The address that a load writes to.
uintptr_t AddressOf(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
}

// What a tensor is in memory.
using Place = std::tuple<Device, uintptr_t, at::ScalarType, bool, bool, std::vector<int64_t>,
                         std::vector<int64_t>>;

Place PlaceOf(const at::Tensor& tensor) {
  return {DeviceOf(tensor), AddressOf(tensor),    tensor.scalar_type(),  tensor.is_conj(),
          tensor.is_neg(),  tensor.sizes().vec(), tensor.strides().vec()};
}

// From the first byte of a tensor to the end of its last one.
struct Range {
  Device device;
  uintptr_t begin, end;
  const std::string* name;
  const at::Tensor* tensor;
  const std::string* first;  // of those that are the same place, by its name
};

Range RangeOf(const std::string& name, const at::Tensor& tensor, const std::string& first) {
  const uintptr_t begin = AddressOf(tensor);
  return {DeviceOf(tensor), begin, begin + ExtentOf(tensor), &name, &tensor, &first};
}

// Returns the bytes that such values are in that tensor's memory, with a dimension for those of an
// element.
at::Tensor BytesIn(const at::Tensor& tensor, at::Tensor values) {
  if (tensor.is_conj()) values = values.conj().resolve_conj();
  if (tensor.is_neg()) values = values.neg();
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.push_back(static_cast<int64_t>(tensor.element_size()));
  return values.contiguous().view(-1).view(at::kByte).view(sizes);
}

// Returns the bytes of a tensor in those of a piece of memory that begins at `begin`, with a
// dimension for those of an element.
at::Tensor BytesOf(const Range& range, const at::Tensor& memory, uintptr_t begin) {
  const int64_t element = static_cast<int64_t>(range.tensor->element_size());
  std::vector<int64_t> sizes = range.tensor->sizes().vec();
  std::vector<int64_t> strides = range.tensor->strides().vec();
  for (int64_t& stride : strides) stride *= element;
  sizes.push_back(element);
  strides.push_back(1);
  return memory.as_strided(sizes, strides, static_cast<int64_t>(range.begin - begin));
}

// Returns whether two different places have a byte in common. `is_written`: for each byte, all
// false.
bool ShareBytes(absl::Span<const Range> ranges, const at::Tensor& is_written, uintptr_t begin) {
  for (const Range& range : ranges) {
    if (range.first != range.name) continue;
    const at::Tensor written = BytesOf(range, is_written, begin);
    if (written.any().item<bool>()) return true;
    written.fill_(true);
  }
  return false;
}

// Finds the conflicts among tensors whose ranges touch, in the order of their names.
absl::Status TryTogether(absl::Span<Range> ranges,
                         absl::FunctionRef<absl::StatusOr<at::Tensor>(const std::string&)> read,
                         std::map<std::string, std::string>* conflicts) {
  uintptr_t begin = ranges[0].begin, end = ranges[0].end;
  bool is_one_place = true;
  for (const Range& range : ranges) {
    begin = std::min(begin, range.begin);
    end = std::max(end, range.end);
    is_one_place &= range.first == ranges[0].first;
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return *a.name < *b.name; });
  // If the first of a place has its values, another one of the place, with others, cannot have
  // them.
  const auto refuse_after_first = [&](const Range& range) {
    if (range.first == range.name || conflicts->count(*range.first) > 0) return false;
    (*conflicts)[*range.name] = absl::StrCat("is the same memory as ", QuoteName(*range.first),
                                             ", for which other values were saved");
    return true;
  };
  const int64_t size = static_cast<int64_t>(end - begin);
  at::Tensor is_written;
  if (!is_one_place) is_written = at::zeros({size}, at::kBool);
  // Most tensors of one buffer, as its columns, only lie between each other: nothing is read then.
  if (is_one_place || !ShareBytes(ranges, is_written, begin)) {
    for (const Range& range : ranges) refuse_after_first(range);
    return absl::OkStatus();
  }
  is_written.zero_();
  const at::Tensor memory = at::empty({size}, at::kByte);
  for (const Range& range : ranges) {
    if (refuse_after_first(range)) continue;
    DG_ASSIGN_OR_RETURN(const at::Tensor values, read(*range.name));
    const at::Tensor bytes = BytesIn(*range.tensor, values);
    const at::Tensor to = BytesOf(range, memory, begin);
    const at::Tensor written = BytesOf(range, is_written, begin);
    if (to.ne(bytes).logical_and_(written).any().item<bool>()) {
      (*conflicts)[*range.name] =
          "shares memory with another tensor, for which other values were saved";
      continue;
    }
    to.copy_(bytes);
    written.fill_(true);
  }
  return absl::OkStatus();
}

// `at`: whose turn it is.
absl::StatusOr<std::map<std::string, std::string>> Find(
    const std::map<std::string, at::Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<uint32_t>(const std::string&)> sum,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(const std::string&)> read,
    const std::string** at) {
  std::map<std::string, std::string> conflicts;
  struct Names {
    const std::string* first;
    std::map<uint32_t, const std::string*> by_sum;  // where there are several
  };
  std::map<Place, Names> places;
  // What has the values, too, of one before it in the same place.
  std::vector<std::pair<const std::string*, const std::string*>> copies;
  std::vector<Range> ranges;
  for (const auto& [name, tensor] : tensors) {
    *at = &name;
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta() || tensor.numel() == 0) {
      continue;
    }
    const auto [at_place, is_new] = places.try_emplace(PlaceOf(tensor), Names{&name, {}});
    Names& names = at_place->second;
    if (is_new) {
      ranges.push_back(RangeOf(name, tensor, name));
      continue;
    }
    if (names.by_sum.empty()) {
      DG_ASSIGN_OR_RETURN(const uint32_t first, sum(*names.first));
      names.by_sum.emplace(first, names.first);
    }
    DG_ASSIGN_OR_RETURN(const uint32_t own, sum(name));
    const auto [same, is_other] = names.by_sum.emplace(own, &name);
    if (is_other) {
      ranges.push_back(RangeOf(name, tensor, *names.first));
    } else {
      copies.emplace_back(&name, same->second);
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.device, a.begin) < std::tie(b.device, b.begin);
  });
  for (size_t first = 0, next = 0; first < ranges.size(); first = next) {
    uintptr_t end = 0;
    for (; next < ranges.size(); ++next) {
      const Range& range = ranges[next];
      if (next > first && (range.device != ranges[first].device || range.begin >= end)) break;
      end = std::max(end, range.end);
    }
    if (next - first == 1) continue;
    *at = ranges[first].name;
    DG_RETURN_IF_ERROR(
        TryTogether(absl::MakeSpan(ranges).subspan(first, next - first), read, &conflicts));
  }
  for (const auto& [name, first] : copies) {
    if (const auto found = conflicts.find(*first); found != conflicts.end()) {
      conflicts[*name] = found->second;
    }
  }
  return conflicts;
}

}  // namespace

bool MayOverlapItself(const at::Tensor& tensor) {
  if (tensor.numel() < 2) return false;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // strides and sizes
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dimensions.begin(), dimensions.end());
  // How far all smaller strides lead together: where each goes beyond that, elements are distinct.
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

absl::StatusOr<std::map<std::string, std::string>> FindConflicts(
    const std::map<std::string, at::Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<uint32_t>(const std::string& name)> sum,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(const std::string& name)> read) {
  const std::string* at = nullptr;
  try {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    return Find(tensors, sum, read, &at);
  } catch (...) {
    const absl::Status thrown = StatusFromException(std::current_exception());
    return at == nullptr
               ? thrown
               : Annotate(thrown, absl::StrCat("finding what shares memory with ", QuoteName(*at)));
  }
}

}  // namespace distgrad
