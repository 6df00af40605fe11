// Does the pieces of work with distgrad's workers, contexts and calls.
#include "benchmarks/distgrad_side.h"

#include <ATen/Parallel.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <cmath>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/values.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/worker/worker.h"

namespace distgrad {
namespace {

constexpr double kFactor = 1.01;
constexpr char kChain[] = "chain";
constexpr char kScale[] = "scale";
// The calls in flight at once, in a pass of many: fewer than a worker allows one peer.
constexpr size_t kWindow = 1024;

std::string NameOf(int rank) { return absl::StrCat("worker", rank); }

absl::StatusOr<at::Tensor> Await(Future<Message>& answer) {
  DG_ASSIGN_OR_RETURN(Message message, answer.Take());
  DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> values,
                      DecodeValues(std::move(message), UINT64_MAX));
  return values.at(0).toTensor();
}

class DistgradSide : public BenchmarkSide {
 public:
  explicit DistgradSide(int world) : world_(world) {}

  absl::Status Start(const SideOptions& place) {
    at::set_num_threads(1);
    const bool one_process = place.config == "inproc";
    const auto network = one_process ? std::make_shared<InprocNetwork>() : nullptr;
    const int here = one_process ? place.world : 1;
    workers_.resize(here);
    std::vector<absl::Status> statuses(here);
    std::vector<std::thread> threads;
    for (int i = 0; i < here; ++i) {
      threads.emplace_back([&, i] {
        auto worker = Worker::Create({.name = NameOf(place.rank + i),
                                      .rendezvous = absl::StrCat("tcp://127.0.0.1:", place.port),
                                      .rank = place.rank + i,
                                      .world_size = place.world,
                                      .transport = place.config,
                                      .network = network});
        statuses[i] = worker.status();
        if (!worker.ok()) return;
        workers_[i] = *std::move(worker);
        statuses[i] = workers_[i]->Register(
            kChain, [this, i](Request& r) { return ServeChain(*workers_[i], r); });
        if (statuses[i].ok()) statuses[i] = workers_[i]->Register(kScale, ServeScale);
        // No worker is called before all have registered.
        if (statuses[i].ok()) {
          statuses[i] = workers_[i]->Barrier(absl::Now() + absl::Seconds(60));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) DG_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    const at::Tensor x = at::ones({static_cast<int64_t>(work.bytes / sizeof(float))});
    if (work.kind == "call") {
      return Repeat(budget, [&] { return Add(x); });
    }
    if (work.kind == "beside") {
      const at::Tensor small = at::ones({1});
      const auto send = [&] {
        return worker().CallOp(NameOf(1), "aten::select.int", {x, 0, 0}).status();
      };
      return RepeatBeside(work.count, budget, send, [&] { return Add(small); });
    }
    if (work.kind == "calls") {
      std::vector<Future<Message>> answers(work.count);
      const auto start = [&](int i) {
        answers[i] =
            worker().CallAsync(NameOf(1), "aten::add.Scalar", EncodeValues({x, 1, 1}).value());
      };
      return RepeatInFlight(work.count, budget, start, [&](int i) -> absl::Status {
        DG_ASSIGN_OR_RETURN(const at::Tensor y, Await(answers[i]));
        return CheckSum(y);
      });
    }
    if (work.kind == "threads") {
      return RepeatOnThreads(work.count, budget, [this] {
        return Pass(at::ones({1}), 1, [this](const Context& context, const at::Tensor& y) {
          return Multiply(context, y);
        });
      });
    }
    if (work.kind == "pass") {
      return Repeat(budget, [&] {
        return Pass(x, work.count,
                    [&](const Context& context, at::Tensor y) -> absl::StatusOr<at::Tensor> {
                      for (int i = 0; i < work.count; ++i) {
                        DG_ASSIGN_OR_RETURN(y, Multiply(context, y));
                      }
                      return y;
                    });
      });
    }
    if (work.kind == "fan") {
      return Repeat(budget, [&] {
        return Pass(x, 1, [&](const Context& context, const at::Tensor& leaf) {
          return Fan(context, leaf, work.count);
        });
      });
    }
    if (work.kind == "tensors") {
      return Repeat(budget, [&] {
        return Pass(x, 1, [&](const Context& context, const at::Tensor& leaf) {
          return Scale(context, leaf, work.count);
        });
      });
    }
    if (work.kind == "chain") {
      return Repeat(budget, [&] {
        return Pass(x, work.count, [&](const Context& context, const at::Tensor& leaf) {
          return CallChain(worker(), leaf, work.count, {.context = &context});
        });
      });
    }
    return absl::UnimplementedError(absl::StrCat("no such work: ", work.kind));
  }

 private:
  Worker& worker() { return *workers_[0]; }

  absl::StatusOr<double> Add(const at::Tensor& x) {
    const double start = MicrosNow();
    DG_ASSIGN_OR_RETURN(const auto values,
                        worker().CallOp(NameOf(1), "aten::add.Scalar", {x, 1, 1}));
    const double micros = MicrosNow() - start;
    DG_RETURN_IF_ERROR(CheckSum(values.at(0).toTensor()));
    return micros;
  }

  absl::StatusOr<at::Tensor> Multiply(const Context& context, const at::Tensor& y) {
    DG_ASSIGN_OR_RETURN(const auto values, worker().CallOp(NameOf(1), "aten::mul.Scalar",
                                                           {y, kFactor}, {.context = &context}));
    return values.at(0).toTensor();
  }

  absl::StatusOr<at::Tensor> Fan(const Context& context, const at::Tensor& leaf, int count) {
    std::deque<Future<Message>> answers;
    std::vector<at::Tensor> results;
    for (int i = 0; i < count || !answers.empty(); ++i) {
      if (i < count) {
        DG_ASSIGN_OR_RETURN(Message message, EncodeValues({leaf, kFactor}));
        answers.push_back(worker().CallAsync(NameOf(1 + i % (world_ - 1)), "aten::mul.Scalar",
                                             std::move(message), {.context = &context}));
        if (answers.size() < kWindow) continue;
      }
      DG_ASSIGN_OR_RETURN(results.emplace_back(), Await(answers.front()));
      answers.pop_front();
    }
    return at::div(at::sum(at::stack(results), 0), count);
  }

  absl::StatusOr<at::Tensor> Scale(const Context& context, const at::Tensor& leaf, int count) {
    DG_ASSIGN_OR_RETURN(const Message reply,
                        worker().Call(NameOf(1), kScale, {"", std::vector<at::Tensor>(count, leaf)},
                                      {.context = &context}));
    return at::div(at::sum(at::stack(reply.tensors), 0), count);
  }

  static absl::StatusOr<Message> ServeScale(Request& request) {
    Message reply;
    for (const at::Tensor& x : request.message.tensors) {
      reply.tensors.push_back(at::mul(x, kFactor));
    }
    return reply;
  }

  absl::StatusOr<at::Tensor> CallChain(Worker& from, const at::Tensor& x, int hops,
                                       const CallOptions& options) {
    const int to = (from.rank() + 1) % world_;
    DG_ASSIGN_OR_RETURN(const Message reply,
                        from.Call(NameOf(to), kChain, {absl::StrCat(hops), {x}}, options));
    return reply.tensors.at(0);
  }

  // x * kFactor, here and on each worker on the way.
  absl::StatusOr<Message> ServeChain(Worker& here, Request& request) {
    const at::Tensor y = at::mul(request.message.tensors.at(0), kFactor);
    int hops = 0;
    if (!absl::SimpleAtoi(request.message.payload, &hops))
      return absl::InvalidArgumentError("how many hops?");
    if (--hops == 0) return Message{"", {y}};
    DG_ASSIGN_OR_RETURN(const at::Tensor result, CallChain(here, y, hops, request.Nested()));
    return Message{"", {result}};
  }

  static absl::Status CheckSum(const at::Tensor& y) {
    const float* const values = y.const_data_ptr<float>();
    if (values[0] == 2 && values[y.numel() - 1] == 2) return absl::OkStatus();
    return absl::InternalError("1 + 1 is not 2");
  }

  // Runs a context, forward, backward, release; checks the gradient, untimed.
  template <typename Forward>
  absl::StatusOr<double> Pass(const at::Tensor& values, int factors, Forward forward) {
    const at::Tensor x = values.detach().requires_grad_();
    const double start = MicrosNow();
    Context context = worker().NewContext();
    {
      DG_ASSIGN_OR_RETURN(const at::Tensor y, forward(context, x));
      DG_RETURN_IF_ERROR(context.Backward({at::sum(y)}));
    }
    const double forward_and_backward = MicrosNow() - start;
    double got;
    {
      DG_ASSIGN_OR_RETURN(const at::Tensor gradient, context.Gradient(x));
      got = gradient.const_data_ptr<float>()[gradient.numel() - 1];
    }
    const double released = MicrosNow();
    context.Release();
    const double micros = forward_and_backward + MicrosNow() - released;
    if (const double want = std::pow(kFactor, factors); std::abs(got - want) > 1e-3 * want) {
      return absl::InternalError(absl::StrCat("the gradient is ", got, ", not ", want));
    }
    return micros;
  }

  const int world_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartDistgrad(const SideOptions& place) {
  auto side = std::make_unique<DistgradSide>(place.world);
  DG_RETURN_IF_ERROR(side->Start(place));
  return side;
}

}  // namespace distgrad
