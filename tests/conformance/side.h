// What the scenarios of scenarios.h need of an implementation of distributed autograd, distgrad's
// or PyTorch's: workers that are processes, functions that they serve, contexts, backward. Errors
// are exceptions here, as PyTorch has them.
#ifndef DISTGRAD_TESTS_CONFORMANCE_SIDE_H_
#define DISTGRAD_TESTS_CONFORMANCE_SIDE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace distgrad {

using Tensors = std::vector<at::Tensor>;

// A context, as one worker sees it. Thread-safe. The origin's end releases it.
class StepContext {
 public:
  using Later = std::function<Tensors()>;  // waits

  virtual ~StepContext() = default;
  virtual Later CallAsync(int to, const std::string& function, Tensors arguments,
                          absl::Duration timeout) = 0;
  Later CallAsync(int to, const std::string& function, Tensors arguments) {
    return CallAsync(to, function, std::move(arguments), absl::Minutes(2));
  }
  Tensors Call(int to, const std::string& function, Tensors arguments) {
    return CallAsync(to, function, std::move(arguments))();
  }
  virtual Tensors CallOp(int to, const std::string& name, const std::string& overload,
                         std::vector<at::IValue> arguments) = 0;
  virtual void Backward(const Tensors& roots, bool retain_graph = false) = 0;
  // Undefined if there is none.
  virtual at::Tensor Gradient(const at::Tensor& leaf) = 0;
  virtual void Release() = 0;
};

// A worker. Thread-safe.
class Side {
 public:
  virtual ~Side() = default;
  virtual std::unique_ptr<StepContext> NewStep() = 0;
  // For calls in no context.
  virtual std::unique_ptr<StepContext> Outside() = 0;
  // What this worker holds: contexts, and passes that run.
  virtual int64_t Contexts() = 0;
  virtual int64_t Passes() = 0;
};

using ServedFunction = std::function<Tensors(Side&, StepContext&, Tensors)>;
using ServedFunctions = std::map<std::string, ServedFunction>;

// Joins a job of so many workers, who meet in a file. Throws.
std::unique_ptr<Side> StartDistgrad(int rank, int world, const std::string& file,
                                    const ServedFunctions& functions);
std::unique_ptr<Side> StartPytorch(int rank, int world, const std::string& file,
                                   const ServedFunctions& functions);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CONFORMANCE_SIDE_H_
