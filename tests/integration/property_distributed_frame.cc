// Programs of property_test over the workers of a job.
#include <ATen/ops/zeros.h>

#include <cstring>
#include <memory>

#include "tests/integration/property_frame.h"

namespace distgrad {
namespace {

// What a call carries: it stays in this process.
struct Order {
  State* run;
  const Step* call;

  static Order Of(const Request& request) {
    Order order;
    std::memcpy(&order, request.message.payload.data(), sizeof(order));
    return order;
  }
  std::string Payload() const {
    return std::string(reinterpret_cast<const char*>(this), sizeof(*this));
  }
};

}  // namespace

absl::Status DistributedFrame::Register(Worker& worker, int index) {
  const absl::Status registered =
      worker.Register("run", [&worker, index](Request& r) -> absl::StatusOr<Message> {
        const Order order = Order::Of(r);
        DistributedFrame frame(order.run, index, &worker, r.Nested());
        return Message{
            "", frame.Run(order.call->body, order.call->results, std::move(r.message.tensors))};
      });
  if (!registered.ok()) return registered;
  return worker.Register("gradients", [index](Request& r) -> absl::StatusOr<Message> {
    State& run = *Order::Of(r).run;
    absl::MutexLock lock(&run.mu);
    for (int i = 0; i < kParameters; ++i) {
      const auto gradient = r.context.Gradient(run.parameters[index][i]);
      if (gradient.ok()) run.gradients[{index, i}] = *gradient;
    }
    return Message{};
  });
}

absl::Status DistributedFrame::TakeGradients(Worker& from, const std::string& worker,
                                             const Context& context, State* run) {
  return from.Call(worker, "gradients", {Order{run, nullptr}.Payload(), {}}, {.context = &context})
      .status();
}

Tensors DistributedFrame::Call(const Step& call, Tensors arguments) {
  return Take(Start(call, std::move(arguments)));
}

void DistributedFrame::CallAsync(const Step& call, Tensors arguments) {
  pending_.push_back(Start(call, std::move(arguments)));
}

Tensors DistributedFrame::Join() {
  Tensors results;
  for (Future<Message>& reply : std::exchange(pending_, {})) {
    for (at::Tensor& result : Take(std::move(reply))) results.push_back(result);
  }
  return results;
}

at::Tensor DistributedFrame::CallMm(int worker, const at::Tensor& a, const at::Tensor& b) {
  const auto product = worker_.CallOp(NameOf(worker), "aten::mm", {a, b}, options_);
  if (product.ok()) return (*product)[0].toTensor();
  run_.Fail(product.status());
  return at::zeros({2, 2});
}

void DistributedFrame::Backward(const Tensors& roots, bool retain_graph, int passes) {
  const BackwardOptions options{.retain_graph = retain_graph, .deadline = options_.deadline};
  std::vector<Future<Unit>> others;
  for (; passes > 1; --passes) others.push_back(options_.context->BackwardAsync(roots, options));
  const absl::Status done = options_.context->Backward(roots, options);
  if (!done.ok()) run_.Fail(done);
  for (const Future<Unit>& other : others) {
    if (!other.Wait().ok()) run_.Fail(other.Wait().status());
  }
}

std::function<void(const at::Tensor& x)> DistributedFrame::BodyOf(const Step& saved) {
  return [run = &run_, index = index_, worker = &worker_, deadline = options_.deadline,
          &saved](const at::Tensor& x) {
    DistributedFrame(run, index, worker, {.deadline = deadline}).Run(saved.body, {}, {x});
  };
}

ProgramFrame::NestedGradient DistributedFrame::GradientOf(const Step& nested) {
  return [run = &run_, index = index_, worker = &worker_, deadline = options_.deadline,
          &nested](const at::Tensor& x) {
    const Context context = worker->NewContext();
    DistributedFrame frame(run, index, worker, {.context = &context, .deadline = deadline});
    const Tensors roots = frame.NestedRoots(nested, x);
    if (roots.empty()) return at::Tensor();
    frame.Backward(roots, /*retain_graph=*/false, /*passes=*/1);
    const auto gradient = context.Gradient(x);
    return gradient.ok() ? *gradient : at::Tensor();
  };
}

Future<Message> DistributedFrame::Start(const Step& call, Tensors arguments) {
  return worker_.CallAsync(NameOf(call.a), "run",
                           {Order{&run_, &call}.Payload(), std::move(arguments)}, options_);
}

Tensors DistributedFrame::Take(Future<Message> reply) {
  absl::StatusOr<Message> message = reply.Take();
  if (message.ok()) return std::move(message->tensors);
  run_.Fail(message.status());
  return {};
}

}  // namespace distgrad
