// Has the autograd nodes that split a batch and join results.
#include "core/parallel/scatter_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <utility>

#include "core/parallel/devices.h"
#include "core/parallel/recording.h"
#include "core/tensor/keep_memory.h"

namespace distgrad {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The backward of Scatter: gathers.
class ScatterBackward : public Node {
 public:
  ScatterBackward(c10::Device device, int64_t dim, std::vector<std::vector<int64_t>> shapes,
                  at::TensorOptions options)
      : device_(device), dim_(dim), shapes_(std::move(shapes)), options_(options) {}

  std::string name() const override { return "distgrad::ScatterBackward"; }

  variable_list apply(variable_list&& gradients) override {
    bool any = false;
    for (const at::Tensor& gradient : gradients) any = any || gradient.defined();
    if (!any) return {at::Tensor()};
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) continue;
      gradients[i] = at::zeros(shapes_[i], options_.device(device_));
    }
    return {Gather(gradients, device_, dim_)};
  }

 private:
  // Constant after construction.
  const c10::Device device_;
  const int64_t dim_;
  const std::vector<std::vector<int64_t>> shapes_;
  const at::TensorOptions options_;
};

// The backward of Gather: scatters.
class GatherBackward : public Node {
 public:
  GatherBackward(std::vector<c10::Device> devices, int64_t dim, std::vector<int64_t> sizes,
                 bool scalars)
      : devices_(std::move(devices)), dim_(dim), sizes_(std::move(sizes)), scalars_(scalars) {}

  std::string name() const override { return "distgrad::GatherBackward"; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(devices_.size());
    variable_list parts = Scatter(gradients[0], devices_, {.dim = dim_, .sizes = sizes_});
    if (scalars_) {
      for (at::Tensor& part : parts) part = part.squeeze(0);
    }
    return parts;
  }

 private:
  // Constant after construction.
  const std::vector<c10::Device> devices_;
  const int64_t dim_;
  const std::vector<int64_t> sizes_;
  const bool scalars_;
};

// Whether a copy may be left to streams. What comes from memory of the host that is not pinned is
// read at once, and what goes to the host is wanted at once.
bool NonBlocking(const at::Tensor& from, c10::Device to) {
  return from.is_cpu() ? to.is_cuda() && from.is_pinned() : !to.is_cpu();
}

// A copy of its own on the device, made on `stream` where there is one.
at::Tensor CopyOf(const at::Tensor& part, c10::Device device,
                  const std::optional<c10::Stream>& stream) {
  const bool non_blocking = NonBlocking(part, device);
  const c10::DeviceGuard on_device(device);
  if (!stream.has_value()) {
    return part.to(part.options().device(device), non_blocking, /*copy=*/true);
  }
  TORCH_CHECK_VALUE(stream->device() == device, "scatter: ", *stream, " is not a stream of ",
                    device);
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  c10::Event before(device.type()), after(device.type());
  before.record(current);
  before.block(*stream);
  at::Tensor copy;
  {
    const c10::StreamGuard guard(*stream);
    copy = part.to(part.options().device(device), non_blocking, /*copy=*/true);
  }
  after.record(*stream);
  after.block(current);
  if (*stream != current) KeepMemoryFor(copy, current);
  return copy;
}

std::vector<int64_t> ChunkSizes(int64_t size, size_t devices, const ScatterOptions& options) {
  if (!options.sizes.empty()) {
    TORCH_CHECK_VALUE(options.sizes.size() == devices, "scatter: ", options.sizes.size(),
                      " chunk sizes for ", devices, " devices");
    for (const int64_t chunk : options.sizes) {
      TORCH_CHECK_VALUE(chunk >= 0, "scatter: a chunk size of ", chunk);
    }
    const int64_t sum = std::accumulate(options.sizes.begin(), options.sizes.end(), int64_t{0});
    TORCH_CHECK_VALUE(sum == size, "scatter: the chunk sizes add up to ", sum,
                      ", and the tensor has ", size, " along dimension ", options.dim);
    return options.sizes;
  }
  const auto count = static_cast<int64_t>(devices);
  const int64_t chunk = std::max<int64_t>((size + count - 1) / count, 1);
  std::vector<int64_t> sizes;
  for (int64_t begin = 0; begin < size; begin += chunk) {
    sizes.push_back(std::min(chunk, size - begin));
  }
  if (sizes.empty()) sizes.push_back(0);
  return sizes;
}

}  // namespace

std::vector<at::Tensor> Scatter(const at::Tensor& tensor, const std::vector<c10::Device>& devices,
                                const ScatterOptions& options) {
  TORCH_CHECK_VALUE(tensor.defined(), "scatter: the tensor is undefined");
  TORCH_CHECK_VALUE(!devices.empty(), "scatter: no devices");
  TORCH_CHECK_VALUE(tensor.dim() > 0, "scatter: a tensor of no dimensions cannot be split");
  TORCH_CHECK_VALUE(options.streams.empty() || options.streams.size() == devices.size(),
                    "scatter: ", options.streams.size(), " streams for ", devices.size(),
                    " devices");
  const int64_t dim = c10::maybe_wrap_dim(options.dim, tensor.dim());
  const std::vector<int64_t> sizes = ChunkSizes(tensor.size(dim), devices.size(), options);
  if (sizes.size() == 1 && options.streams.empty()) {
    const c10::Device device = Canonical(devices[0]);
    return {tensor.to(device, NonBlocking(tensor, device))};
  }
  std::vector<at::Tensor> parts;
  std::vector<std::vector<int64_t>> shapes;
  {
    const at::NoGradGuard no_grad;
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const at::Tensor part = tensor.narrow(dim, begin, sizes[i]);
      parts.push_back(CopyOf(part, Canonical(devices[i]),
                             options.streams.empty() ? std::nullopt : options.streams[i]));
      shapes.push_back(parts.back().sizes().vec());
      begin += sizes[i];
    }
  }
  if (AnyNeedsGradient({tensor})) {
    const auto node = std::make_shared<ScatterBackward>(tensor.device(), dim, std::move(shapes),
                                                        tensor.options());
    node->set_next_edges(EdgesOf({tensor}));
    for (const at::Tensor& part : parts) AddOutput(node, part, true);
  }
  return parts;
}

at::Tensor Gather(const std::vector<at::Tensor>& tensors, std::optional<c10::Device> destination,
                  int64_t dim) {
  TORCH_CHECK_VALUE(!tensors.empty(), "gather: no tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].defined(), "gather: tensor ", i, " is undefined");
  }
  const at::Tensor& first = tensors[0];
  const bool scalars = first.dim() == 0;
  dim = c10::maybe_wrap_dim(dim, std::max<int64_t>(first.dim(), 1));
  if (scalars) {
    TORCH_WARN_ONCE(
        "gather: tensors of no dimensions cannot be put behind one another; the result is a "
        "vector of them");
  }
  std::vector<int64_t> shape = scalars ? std::vector<int64_t>{0} : first.sizes().vec();
  std::vector<int64_t> sizes;
  std::vector<c10::Device> devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    bool fits = tensor.dim() == first.dim() && tensor.scalar_type() == first.scalar_type();
    for (int64_t d = 0; fits && d < first.dim(); ++d) {
      fits = d == dim || tensor.size(d) == first.size(d);
    }
    TORCH_CHECK_VALUE(fits, "gather: tensor ", i, " is ", tensor.scalar_type(), " ", tensor.sizes(),
                      ", which does not fit behind ", first.scalar_type(), " ", first.sizes(),
                      " along dimension ", dim);
    sizes.push_back(scalars ? 1 : tensor.size(dim));
    devices.push_back(tensor.device());
  }
  shape[dim] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const c10::Device where = Canonical(destination.value_or(first.device()));
  if (tensors.size() == 1 && !scalars) return first.to(where, NonBlocking(first, where));
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    const c10::DeviceGuard guard(where);
    result = at::empty(shape, first.options().device(where), first.suggest_memory_format());
    int64_t begin = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor part =
          scalars ? result.select(0, begin) : result.narrow(dim, begin, sizes[i]);
      part.copy_(tensors[i], NonBlocking(tensors[i], where));
      begin += sizes[i];
    }
  }
  if (AnyNeedsGradient(tensors)) {
    const auto node =
        std::make_shared<GatherBackward>(std::move(devices), dim, std::move(sizes), scalars);
    node->set_next_edges(EdgesOf(tensors));
    AddOutput(node, result, true);
  }
  return result;
}

std::vector<std::vector<at::Tensor>> ScatterAll(const std::vector<at::Tensor>& tensors,
                                                const std::vector<c10::Device>& devices,
                                                const ScatterOptions& options) {
  TORCH_CHECK_VALUE(!devices.empty(), "scatter: no devices");
  std::vector<std::vector<at::Tensor>> parts_of(tensors.size());
  std::optional<size_t> parts;
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (!tensors[k].defined()) continue;
    parts_of[k] = Scatter(tensors[k], devices, options);
    TORCH_CHECK_VALUE(!parts.has_value() || *parts == parts_of[k].size(), "scatter: tensor ", k,
                      " of the inputs, ", tensors[k].sizes(), ", gives ", parts_of[k].size(),
                      " parts along dimension ", options.dim, ", and one before it ", *parts);
    parts = parts_of[k].size();
  }
  std::vector<std::vector<at::Tensor>> lists(parts.value_or(devices.size()),
                                             std::vector<at::Tensor>(tensors.size()));
  for (size_t i = 0; i < lists.size(); ++i) {
    for (size_t k = 0; k < tensors.size(); ++k) {
      if (tensors[k].defined()) lists[i][k] = parts_of[k][i];
    }
  }
  return lists;
}

std::vector<at::Tensor> GatherAll(const std::vector<std::vector<at::Tensor>>& lists,
                                  std::optional<c10::Device> destination, int64_t dim) {
  TORCH_CHECK_VALUE(!lists.empty(), "gather: nothing to gather");
  std::vector<at::Tensor> results(lists[0].size());
  for (size_t k = 0; k < results.size(); ++k) {
    if (!lists[0][k].defined()) continue;
    std::vector<at::Tensor> parts;
    for (const std::vector<at::Tensor>& list : lists) parts.push_back(list[k]);
    results[k] = Gather(parts, destination, dim);
  }
  return results;
}

void ThrowNotAlike(size_t value) {
  TORCH_CHECK_VALUE(false, "gather: the output of replica ", value,
                    " is not of the same structure as that of replica 0");
}

}  // namespace distgrad
