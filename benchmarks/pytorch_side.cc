// Does the same pieces of work with PyTorch's RPC agent and its distributed autograd.
#include "benchmarks/pytorch_side.h"

#include <ATen/Parallel.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

namespace rpc = torch::distributed::rpc;
namespace dist = torch::distributed::autograd;

using Answer = c10::intrusive_ptr<rpc::JitFuture>;

constexpr double kFactor = 1.01;
constexpr char kChain[] = "benchmark.chain";
constexpr char kScale[] = "benchmark.scale";
constexpr char kLoss[] = "benchmark.loss";
constexpr char kDescend[] = "benchmark.descend";
// Keys of the store: rank 0 has ended; another rank has heard of it.
constexpr char kEnd[] = "benchmark.end";
std::string EndOf(int rank) { return absl::StrCat(kEnd, ".", rank); }

at::IValue ValueOf(rpc::JitFuture& answer) {
  auto message = answer.constValue().toCustomClass<rpc::Message>();
  return rpc::deserializeRespToIValue(*message);
}
at::Tensor TensorOf(rpc::JitFuture& answer) { return ValueOf(answer).toTensor(); }
at::Tensor Await(const Answer& answer) {
  answer->waitAndThrow();
  return TensorOf(*answer);
}

class PytorchSide;
PytorchSide* the_side = nullptr;  // its agent is one for the process, too

// Without Python it serves operators only; this adds one of ours.
class Callback : public rpc::RequestCallbackNoPython {
 protected:
  Answer processScriptCall(rpc::RpcCommandBase& command,
                           const std::vector<c10::Stream>& streams) const override;
};

class PytorchSide : public BenchmarkSide {
 public:
  // `part`: of `job`, in TrainWithPytorch() alone; as long as the side.
  explicit PytorchSide(const SideOptions& place, const SplitJob* job = nullptr,
                       const SplitPart* part = nullptr)
      : place_(place), job_(job), part_(part) {
    at::set_num_threads(1);
    std::optional<std::vector<std::string>> transports, channels;
    int threads = rpc::kDefaultNumWorkerThreads;
    if (place.config == "uv") {
      transports = {"uv"};
      channels = {"basic"};
    } else if (place.config == "uv+cma") {
      transports = {"uv"};
      channels = {"cma", "basic"};
    } else if (place.config == "few") {
      threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    }
    c10d::TCPStoreOptions store;
    store.port = static_cast<uint16_t>(place.port);
    store.isServer = place.rank == 0;
    store.numWorkers = place.world;
    const rpc::TensorPipeRpcBackendOptions options(threads, transports, channels,
                                                   rpc::kDefaultRpcTimeoutSeconds, "");
    dist::DistAutogradContainer::init(static_cast<int64_t>(place.rank));
    agent_ = std::make_shared<rpc::TensorPipeAgent>(
        store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store), NameOf(place.rank),
        static_cast<rpc::worker_id_t>(place.rank), place.world, options,
        std::unordered_map<std::string, rpc::DeviceMap>{}, std::vector<c10::Device>{},
        std::make_unique<Callback>());
    rpc::RpcAgent::setCurrentRpcAgent(agent_);
    // The agent calls this to parse the type that comes with every message.
    auto unit = std::make_shared<torch::jit::CompilationUnit>();
    auto parser = std::make_shared<torch::jit::ScriptTypeParser>();
    agent_->setTypeResolver(
        std::make_shared<rpc::TypeResolver>([unit, parser](const c10::QualifiedName& name) {
          return c10::StrongTypePtr(unit, parser->parseType(name.qualifiedName()));
        }));
    agent_->start();
    the_side = this;
  }

  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    try {
      const at::Tensor x = at::ones({static_cast<int64_t>(work.bytes / sizeof(float))});
      if (work.kind == "call") {
        return Repeat(budget, [&] { return Add(x); });
      }
      if (work.kind == "beside") {
        const at::Tensor small = at::ones({1});
        const auto send = [&] {
          Await(Send(1, rpc::ScriptCall(select_, {x, 0, 0})));
          return absl::OkStatus();
        };
        return RepeatBeside(work.count, budget, send, [&] { return Add(small); });
      }
      if (work.kind == "calls") {
        std::vector<Answer> answers(work.count);
        return RepeatInFlight(
            work.count, budget, [&](int i) { answers[i] = CallAdd(x); },
            [&](int i) { return CheckSum(Await(answers[i])); });
      }
      if (work.kind == "threads") {
        return RepeatOnThreads(work.count, budget, [&] {
          return Pass(at::ones({1}), 1,
                      [this](const at::Tensor& y) { return Await(CallMul(1, y)); });
        });
      }
      if (work.kind == "pass") {
        return Repeat(budget, [&] {
          return Pass(x, work.count, [&](at::Tensor y) {
            for (int i = 0; i < work.count; ++i) y = Await(CallMul(1, y));
            return y;
          });
        });
      }
      if (work.kind == "fan") {
        return Repeat(budget, [&] {
          return Pass(x, 1, [&](const at::Tensor& leaf) {
            std::vector<Answer> answers;
            for (int i = 0; i < work.count; ++i)
              answers.push_back(CallMul(1 + i % (place_.world - 1), leaf));
            std::vector<at::Tensor> results;
            for (const Answer& answer : answers) results.push_back(Await(answer));
            return at::div(at::sum(at::stack(results), 0), work.count);
          });
        });
      }
      if (work.kind == "tensors") {
        return Repeat(budget, [&] {
          return Pass(x, 1, [&](const at::Tensor& leaf) {
            const Answer answer =
                Send(1, rpc::ScriptCall(c10::QualifiedName(kScale),
                                        {std::vector<at::Tensor>(work.count, leaf)}));
            answer->waitAndThrow();
            return at::div(at::sum(at::stack(ValueOf(*answer).toTensorVector()), 0), work.count);
          });
        });
      }
      if (work.kind == "chain") {
        return Repeat(budget, [&] {
          return Pass(x, work.count,
                      [&](const at::Tensor& leaf) { return Await(CallChain(leaf, work.count)); });
        });
      }
      return absl::UnimplementedError(absl::StrCat("no such work: ", work.kind));
    } catch (const std::exception& e) {
      return absl::InternalError(e.what());
    }
  }

  static at::IValue ServeScale(const std::vector<at::IValue>& arguments) {
    std::vector<at::Tensor> results;
    for (const at::Tensor& x : arguments[0].toTensorVector()) {
      results.push_back(at::mul(x, kFactor));
    }
    return results;
  }

  // A step with the first part of a model here, and the others on the other workers.
  void Step(const std::vector<at::Tensor>& xs, const std::vector<at::Tensor>& ys) {
    auto& container = dist::DistAutogradContainer::getInstance();
    const int64_t id = container.newContext()->contextId();
    {
      std::vector<Answer> answers;
      for (size_t m = 0; m < xs.size(); ++m) {
        answers.push_back(CallLoss(xs[m], ys[m]));
      }
      std::vector<at::Tensor> losses;
      for (const Answer& answer : answers) losses.push_back(Await(answer));
      const at::Tensor loss = at::div(at::sum(at::stack(losses)), double(losses.size()));
      dist::DistEngine::getInstance().execute(id, {loss}, /*retainGraph=*/false);
    }
    std::vector<Answer> there;
    for (int rank = 1; rank < place_.world; ++rank) {
      there.push_back(Send(rank, rpc::ScriptCall(c10::QualifiedName(kDescend), {id})));
    }
    Descend(id);
    for (const Answer& answer : there) Await(answer);
    container.releaseContext(id);
  }
  // The loss of what the part before has given: from the workers behind this one, or, on the last
  // one, from here.
  Answer ServeLoss(const std::vector<at::IValue>& arguments) {
    const at::Tensor x = arguments[0].toTensor(), y = arguments[1].toTensor();
    if (place_.rank + 1 < place_.world) {
      return CallLoss(x, y)->then([](rpc::JitFuture& f) { return at::IValue(TensorOf(f)); },
                                  c10::AnyType::get());
    }
    auto done = c10::make_intrusive<rpc::JitFuture>(c10::AnyType::get());
    done->markCompleted(at::IValue(job_->Loss(part_->Forward({x})[0], y)));
    return done;
  }
  void Descend(int64_t id) const {
    const auto gradients =
        dist::DistAutogradContainer::getInstance().retrieveContext(id)->getGradients();
    part_->Descend([&](const at::Tensor& parameter) { return gradients.at(parameter); });
  }
  // Rank 0 serves the store: it has ended as well if that is gone.
  void AwaitEnd() {
    try {
      store_->wait({kEnd}, std::chrono::minutes(10));
      store_->set(EndOf(place_.rank), {1});
    } catch (const std::exception&) {
      return;
    }
  }
  // Waits until the others know: a store that ended before would have them print stack traces.
  void End() {
    store_->set(kEnd, {1});
    std::vector<std::string> others;
    for (int rank = 1; rank < place_.world; ++rank) others.push_back(EndOf(rank));
    store_->wait(others, std::chrono::minutes(1));
  }

  // x * kFactor, here or, after as many hops, on each worker on the way.
  Answer ServeChain(const std::vector<at::IValue>& arguments) {
    const at::Tensor y = at::mul(arguments[0].toTensor(), kFactor);
    const int64_t left = arguments[1].toInt() - 1;
    if (left == 0) {
      auto done = c10::make_intrusive<rpc::JitFuture>(c10::AnyType::get());
      done->markCompleted(at::IValue(y));
      return done;
    }
    return CallChain(y, left)->then([](rpc::JitFuture& f) { return at::IValue(TensorOf(f)); },
                                    c10::AnyType::get());
  }

 private:
  static std::string NameOf(int rank) { return absl::StrCat("worker", rank); }

  Answer Send(int to, rpc::ScriptCall call) {
    return dist::sendMessageWithAutograd(*agent_,
                                         agent_->getWorkerInfo(static_cast<rpc::worker_id_t>(to)),
                                         std::move(call).toMessage(), /*forceGradRecording=*/false);
  }
  absl::StatusOr<double> Add(const at::Tensor& x) {
    const double start = MicrosNow();
    const at::Tensor y = Await(CallAdd(x));
    const double micros = MicrosNow() - start;
    if (auto wrong = CheckSum(y); !wrong.ok()) return wrong;
    return micros;
  }

  Answer CallAdd(const at::Tensor& x) { return Send(1, rpc::ScriptCall(add_, {x, 1, 1})); }
  Answer CallMul(int to, const at::Tensor& x) {
    return Send(to, rpc::ScriptCall(mul_, {x, kFactor}));
  }
  // What goes in here, and the targets; the loss.
  Answer CallLoss(const at::Tensor& x, const at::Tensor& y) {
    return Send(place_.rank + 1,
                rpc::ScriptCall(c10::QualifiedName(kLoss), {part_->Forward({x})[0], y}));
  }
  Answer CallChain(const at::Tensor& x, int64_t hops) {
    return Send((place_.rank + 1) % place_.world,
                rpc::ScriptCall(c10::QualifiedName(kChain), {x, hops}));
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
    auto& container = dist::DistAutogradContainer::getInstance();
    const double start = MicrosNow();
    auto context = container.newContext();
    const int64_t id = context->contextId();
    {
      const at::Tensor loss = at::sum(forward(x));
      dist::DistEngine::getInstance().execute(id, {loss}, /*retainGraph=*/false);
    }
    const double forward_and_backward = MicrosNow() - start;
    const at::Tensor gradient = context->getGradients().at(x);
    const double got = gradient.const_data_ptr<float>()[gradient.numel() - 1];
    context.reset();
    const double released = MicrosNow();
    container.releaseContext(id);
    const double micros = forward_and_backward + MicrosNow() - released;
    if (const double want = std::pow(kFactor, factors); std::abs(got - want) > 1e-3 * want) {
      return absl::InternalError(absl::StrCat("the gradient is ", got, ", not ", want));
    }
    return micros;
  }

  static std::shared_ptr<torch::jit::Operator> Find(const char* name,
                                                    const char* overload = "Scalar") {
    auto found = torch::jit::findOperatorFor(c10::OperatorName(name, overload));
    TORCH_CHECK(found, "no operator ", name);
    return found;
  }

  const SideOptions place_;
  const SplitJob* const job_;    // null but in TrainWithPytorch()
  const SplitPart* const part_;  // the same
  c10::intrusive_ptr<c10d::TCPStore> store_;
  const std::shared_ptr<torch::jit::Operator> add_ = Find("aten::add");
  const std::shared_ptr<torch::jit::Operator> mul_ = Find("aten::mul");
  const std::shared_ptr<torch::jit::Operator> select_ = Find("aten::select", "int");
  std::shared_ptr<rpc::TensorPipeAgent> agent_;
};

Answer Callback::processScriptCall(rpc::RpcCommandBase& command,
                                   const std::vector<c10::Stream>& streams) const {
  auto& call = static_cast<rpc::ScriptCall&>(command);
  if (call.hasOp()) return RequestCallbackNoPython::processScriptCall(command, streams);
  Answer answer;
  if (call.qualifiedName().qualifiedName() == kScale) {
    answer = c10::make_intrusive<rpc::JitFuture>(c10::ListType::ofTensors());
    answer->markCompleted(PytorchSide::ServeScale(call.stackRef()));
  } else if (call.qualifiedName().qualifiedName() == kLoss) {
    answer = the_side->ServeLoss(call.stackRef());
  } else if (call.qualifiedName().qualifiedName() == kDescend) {
    the_side->Descend(call.stackRef()[0].toInt());
    answer = c10::make_intrusive<rpc::JitFuture>(c10::AnyType::get());
    answer->markCompleted(at::IValue(at::ones({1})));
  } else {
    TORCH_CHECK(call.qualifiedName().qualifiedName() == kChain);
    answer = the_side->ServeChain(call.stackRef());
  }
  return answer->then(
      [](rpc::JitFuture& f) {
        return rpc::withStorages(rpc::ScriptResp(at::IValue(f.value())).toMessage());
      },
      c10::getCustomClassType<c10::intrusive_ptr<rpc::Message>>());
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartPytorch(const SideOptions& place) {
  try {
    return std::make_unique<PytorchSide>(place);
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  }
}

absl::Status TrainWithPytorch(const SplitJob& job, int parts, const SideOptions& place, int rounds,
                              std::vector<double>* said) {
  try {
    // They end with the process: the agent's threads may use them until then.
    const auto* const its_job = new SplitJob(job);
    const auto* const part = new SplitPart(job, place.rank, place.world);
    auto* const side = new PytorchSide(place, its_job, part);
    if (place.rank != 0) {
      side->AwaitEnd();
      return absl::OkStatus();
    }
    const std::vector<at::Tensor> xs = job.Inputs().tensor_split(parts);
    const std::vector<at::Tensor> ys = job.Targets().tensor_split(parts);
    const absl::Status measured = MeasureSplit(job, rounds, said, [&] {
      side->Step(xs, ys);
      return absl::OkStatus();
    });
    side->End();
    return measured;
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  }
}

}  // namespace distgrad
