// Puts distgrad's workers and contexts behind the interface of the scenarios.
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "core/autograd/state.h"
#include "core/worker/worker.h"
#include "tests/conformance/side.h"

namespace distgrad {
namespace {

void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

class DistgradStep : public StepContext {
 public:
  DistgradStep(Worker* worker, Context context)
      : worker_(*worker), own_(std::move(context)), context_(own_) {}
  DistgradStep(Worker* worker, const Context* context) : worker_(*worker), context_(*context) {}

  using StepContext::CallAsync;
  Later CallAsync(int to, const std::string& function, Tensors arguments,
                  absl::Duration timeout) override {
    Future<Message> reply = worker_.CallAsync(absl::StrCat("worker", to), function,
                                              {"", std::move(arguments)}, Options(timeout));
    return [reply] {
      Check(reply.Wait().status());
      return reply.Wait()->tensors;
    };
  }
  Tensors CallOp(int to, const std::string& name, const std::string& overload,
                 std::vector<at::IValue> arguments) override {
    const auto results =
        worker_.CallOp(absl::StrCat("worker", to), absl::StrCat(name, ".", overload),
                       std::move(arguments), Options(absl::Minutes(2)));
    Check(results.status());
    Tensors tensors;
    for (const at::IValue& result : *results) tensors.push_back(result.toTensor());
    return tensors;
  }
  void Backward(const Tensors& roots, bool retain_graph) override {
    Check(context_.Backward(
        roots, {.retain_graph = retain_graph, .deadline = absl::Now() + absl::Minutes(2)}));
  }
  at::Tensor Gradient(const at::Tensor& leaf) override {
    const absl::StatusOr<at::Tensor> gradient = context_.Gradient(leaf);
    if (absl::IsNotFound(gradient.status())) return at::Tensor();
    Check(gradient.status());
    return *gradient;
  }
  void Release() override { own_.Release(); }

 private:
  CallOptions Options(absl::Duration timeout) const {
    return {.context = context_.valid() ? &context_ : nullptr, .deadline = absl::Now() + timeout};
  }

  Worker& worker_;
  Context own_;
  const Context& context_;
};

class DistgradSide : public Side {
 public:
  DistgradSide(int rank, int world, const std::string& file, const ServedFunctions& functions) {
    auto worker =
        Worker::Create({.rendezvous = absl::StrCat("file://", file),
                        .rank = rank,
                        .world_size = world,
                        .thread_count = 8});  // some scenarios have several nodes block theirs
    Check(worker.status());
    worker_ = *std::move(worker);
    for (const auto& [name, function] : functions) {
      Check(worker_->Register(name, [this, &function = function](Request& request) {
        DistgradStep step(worker_.get(), &request.context);
        return absl::StatusOr<Message>(
            Message{"", function(*this, step, std::move(request.message.tensors))});
      }));
    }
    Check(worker_->Barrier(absl::Now() + absl::Minutes(1)));
  }
  std::unique_ptr<StepContext> NewStep() override {
    return std::make_unique<DistgradStep>(worker_.get(), worker_->NewContext());
  }
  std::unique_ptr<StepContext> Outside() override {
    return std::make_unique<DistgradStep>(worker_.get(), Context());
  }
  int64_t Contexts() override { return static_cast<int64_t>(worker_->context_count()); }
  int64_t Passes() override {
    int64_t passes = 0;
    for (const ContextState& context : worker_->Contexts())
      passes += static_cast<int64_t>(context.passes.size());
    return passes;
  }

 private:
  std::unique_ptr<Worker> worker_;
};

}  // namespace

std::unique_ptr<Side> StartDistgrad(int rank, int world, const std::string& file,
                                    const ServedFunctions& functions) {
  return std::make_unique<DistgradSide>(rank, world, file, functions);
}

}  // namespace distgrad
