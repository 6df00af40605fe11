// PyTorch's RPC agent and distributed autograd, driven from C++ without Python.
#include <ATen/Parallel.h>
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

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "absl/strings/str_cat.h"
#include "tests/conformance/side.h"

namespace distgrad {
namespace {

namespace rpc = torch::distributed::rpc;
namespace dist = torch::distributed::autograd;
using Answer = c10::intrusive_ptr<rpc::JitFuture>;

dist::DistAutogradContainer& Container() { return dist::DistAutogradContainer::getInstance(); }

// Its contexts belong to threads: makes one this thread's for a while.
class InContext {
 public:
  explicit InContext(int64_t id) : before_(dist::DistAutogradContainer::currentContextId()) {
    dist::DistAutogradContainer::forceCurrentContextId(id);
  }
  ~InContext() { dist::DistAutogradContainer::forceCurrentContextId(before_); }

 private:
  const int64_t before_;
};

Tensors TensorsOf(const at::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  Tensors tensors;
  for (const at::IValue& one : value.toTuple()->elements()) tensors.push_back(one.toTensor());
  return tensors;
}

class PytorchStep : public StepContext {
 public:
  PytorchStep(int64_t id, bool is_origin) : id_(id), is_origin_(is_origin) {}
  ~PytorchStep() override {
    if (is_origin_) Container().releaseContextIfPresent(id_);
  }

  using StepContext::CallAsync;
  Later CallAsync(int to, const std::string& function, Tensors arguments,
                  absl::Duration timeout) override {
    return Send(to,
                rpc::ScriptCall(c10::QualifiedName(absl::StrCat("conformance.", function)),
                                std::vector<at::IValue>(arguments.begin(), arguments.end())),
                /*always_in_context=*/true, timeout);
  }
  Tensors CallOp(int to, const std::string& name, const std::string& overload,
                 std::vector<at::IValue> arguments) override {
    auto found = torch::jit::findOperatorFor(c10::OperatorName(name, overload));
    TORCH_CHECK(found, "no operator ", name);
    return Send(to, rpc::ScriptCall(found, std::move(arguments)), /*always_in_context=*/false,
                absl::Minutes(2))();
  }
  void Backward(const Tensors& roots, bool retain_graph) override {
    dist::DistEngine::getInstance().execute(id_, roots, retain_graph);
  }
  at::Tensor Gradient(const at::Tensor& leaf) override {
    const auto gradients = Container().retrieveContext(id_)->getGradients();
    return gradients.contains(leaf) ? gradients.at(leaf) : at::Tensor();
  }
  void Release() override { Container().releaseContext(id_); }

 private:
  // As from Python: a function hears of the context always, an operator if it needs a gradient.
  Later Send(int to, rpc::ScriptCall call, bool always_in_context, absl::Duration timeout) {
    const InContext in_context(id_);
    const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
    const Answer answer = dist::sendMessageWithAutograd(
        *agent, agent->getWorkerInfo(static_cast<rpc::worker_id_t>(to)),
        std::move(call).toMessage(), always_in_context,
        static_cast<float>(absl::ToDoubleSeconds(timeout)));
    return [answer] {
      answer->waitAndThrow();
      const auto message = answer->constValue().toCustomClass<rpc::Message>();
      return TensorsOf(rpc::deserializeRespToIValue(*message));
    };
  }

  const int64_t id_;
  const bool is_origin_;
};

class PytorchSide : public Side {
 public:
  std::unique_ptr<StepContext> NewStep() override {
    return std::make_unique<PytorchStep>(Container().newContext()->contextId(),
                                         /*is_origin=*/true);
  }
  std::unique_ptr<StepContext> Outside() override {
    return std::make_unique<PytorchStep>(/*id=*/-1, /*is_origin=*/false);
  }
  int64_t Contexts() override { return static_cast<int64_t>(Container().numAutogradContexts()); }
  int64_t Passes() override {
    return static_cast<int64_t>(dist::DistEngine::getInstance().numBackwardPasses());
  }
};

// What it serves without Python are operators; our functions are added.
class Callback : public rpc::RequestCallbackNoPython {
 public:
  Callback(Side* side, const ServedFunctions& functions) : side_(side), functions_(functions) {}

 protected:
  Answer processScriptCall(rpc::RpcCommandBase& command,
                           const std::vector<c10::Stream>& streams) const override {
    auto& call = static_cast<rpc::ScriptCall&>(command);
    if (call.hasOp()) return RequestCallbackNoPython::processScriptCall(command, streams);
    Tensors arguments;
    for (const at::IValue& value : call.stackRef()) arguments.push_back(value.toTensor());
    PytorchStep step(dist::DistAutogradContainer::currentContextId(), /*is_origin=*/false);
    const Tensors results =
        functions_.at(call.qualifiedName().name())(*side_, step, std::move(arguments));
    auto [message, storages] = rpc::withStorages(rpc::ScriptResp(at::IValue(results)).toMessage());
    auto done = c10::make_intrusive<rpc::JitFuture>(
        c10::getCustomClassType<c10::intrusive_ptr<rpc::Message>>());
    done->markCompleted(std::move(message), std::move(storages));
    return done;
  }

 private:
  Side* const side_;
  const ServedFunctions& functions_;
};

}  // namespace

std::unique_ptr<Side> StartPytorch(int rank, int world, const std::string& file,
                                   const ServedFunctions& functions) {
  at::set_num_threads(1);
  auto side = std::make_unique<PytorchSide>();
  // The agent is one for the process, and outlives its side: those who use it end by _exit().
  const rpc::TensorPipeRpcBackendOptions options(
      rpc::kDefaultNumWorkerThreads, std::vector<std::string>{"uv"},
      std::vector<std::string>{"basic"}, /*rpc_timeout=*/120, "");
  dist::DistAutogradContainer::init(rank);
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      c10::make_intrusive<c10d::FileStore>(file, world), absl::StrCat("worker", rank),
      static_cast<rpc::worker_id_t>(rank), world, options,
      std::unordered_map<std::string, rpc::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<Callback>(side.get(), functions));
  rpc::RpcAgent::setCurrentRpcAgent(agent);
  // It asks this to parse the type that comes with every message.
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto parser = std::make_shared<torch::jit::ScriptTypeParser>();
  agent->setTypeResolver(
      std::make_shared<rpc::TypeResolver>([unit, parser](const c10::QualifiedName& name) {
        return c10::StrongTypePtr(unit, parser->parseType(name.qualifiedName()));
      }));
  agent->start();
  return side;
}

}  // namespace distgrad
