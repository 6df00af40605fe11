// One batch onto many devices, and many results into one. Both are differentiable any number of
// times: the backward of each is the other.
//
//   std::vector<at::Tensor> chunks = Scatter(batch, devices);
//   ...
//   at::Tensor result = Gather(results, devices[0]);
//
// Like torch's own operators, which they stand among, they throw: c10::ValueError for bad
// arguments, which it names. Copies between accelerators do not wait for them; results are ready
// on the current streams of the calling thread.
#ifndef DISTGRAD_CORE_PARALLEL_SCATTER_GATHER_H_
#define DISTGRAD_CORE_PARALLEL_SCATTER_GATHER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/tensor/nested.h"

namespace distgrad {

struct ScatterOptions {
  int64_t dim = 0;
  // The sizes along `dim` of the devices' parts. Empty: parts as equal as at::chunk makes them, and
  // fewer than there are devices where `dim` is too short; a `dim` of 0 gives one part.
  std::vector<int64_t> sizes = {};
  // The streams, or none: for each device the one that its copy runs on, and that the current
  // stream then waits for. nullopt: the current stream.
  std::vector<std::optional<c10::Stream>> streams = {};
};

// Parts of `tensor` along options.dim, the i-th on devices[i], in memory of their own; but where
// there is only one part, and on the tensor's device, it is the tensor. A tensor of no dimensions
// cannot be split. Copies of a pinned tensor to GPUs run at the same time, and after this returns:
// it is not to be written to before the parts are ready.
std::vector<at::Tensor> Scatter(const at::Tensor& tensor, const std::vector<c10::Device>& devices,
                                const ScatterOptions& options = {});

// Returns the tensors, equal in all but the size of `dim`, behind one another on `destination` (by
// default the device of the first). Those of no dimensions give a vector along dim 0, with a
// warning, as in PyTorch.
at::Tensor Gather(const std::vector<at::Tensor>& tensors,
                  std::optional<c10::Device> destination = std::nullopt, int64_t dim = 0);

// Returns for each device a T with its part of every tensor; undefined tensors stay undefined, and
// plain values are copied. Without any tensor there is one for each device. All tensors have to
// give the same number of parts.
template <typename T>
std::vector<T> Scatter(const T& value, const std::vector<c10::Device>& devices,
                       const ScatterOptions& options = {});

// Returns a T of gathered tensors. All values have to be of one structure: lists of one length,
// maps of the same keys, the same optionals and undefined tensors.
template <typename T>
T Gather(const std::vector<T>& values, std::optional<c10::Device> destination = std::nullopt,
         int64_t dim = 0);

// Details only below.

// Returns the parts by device, then by tensor.
std::vector<std::vector<at::Tensor>> ScatterAll(const std::vector<at::Tensor>& tensors,
                                                const std::vector<c10::Device>& devices,
                                                const ScatterOptions& options);
std::vector<at::Tensor> GatherAll(const std::vector<std::vector<at::Tensor>>& lists,
                                  std::optional<c10::Device> destination, int64_t dim);
[[noreturn]] void ThrowNotAlike(size_t value);

template <typename T>
std::vector<T> Scatter(const T& value, const std::vector<c10::Device>& devices,
                       const ScatterOptions& options) {
  std::vector<T> parts;
  for (const std::vector<at::Tensor>& tensors : ScatterAll(TensorsOf(value), devices, options)) {
    parts.push_back(WithTensors(value, tensors));
  }
  return parts;
}

template <typename T>
T Gather(const std::vector<T>& values, std::optional<c10::Device> destination, int64_t dim) {
  static_assert(Nested<T>::kTensors,
                "what is gathered may hold tensors, and vectors, maps, pairs, tuples and optionals "
                "of them, and no other values");
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!Nested<T>::Alike(values[0], values[i])) ThrowNotAlike(i);
    lists.push_back(TensorsOf(values[i]));
  }
  const std::vector<at::Tensor> gathered = GatherAll(lists, destination, dim);
  return WithTensors(values[0], gathered);
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_SCATTER_GATHER_H_
