// Runs the programs of property_program.h: in one process (LocalFrame, by libtorch's engine alone,
// which is what all else is compared with), or over the workers of a job (DistributedFrame).
#ifndef DISTGRAD_TESTS_INTEGRATION_PROPERTY_FRAME_H_
#define DISTGRAD_TESTS_INTEGRATION_PROPERTY_FRAME_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/worker/worker.h"
#include "tests/integration/property_program.h"
#include "tests/testing/cluster.h"

namespace distgrad {

using Tensors = std::vector<at::Tensor>;

// What a hook or a function of a program was shown, over all of a run.
struct Sight {
  int gradients = 0, undefined = 0;
  double sum = 0;  // of all elements
};

// The state of one run of a program.
struct State {
  std::vector<Tensors> parameters;  // by worker
  std::vector<Tensors> kept = std::vector<Tensors>(kWorkers + 1);
  std::string newcomer = {};  // its name
  // Whether the run is to be wrong, so that it can be seen that it is found out.
  bool broken = false;
  // The store of the job waits for it before it answers. Null in one process.
  absl::Mutex* look_ups = nullptr;

  absl::Mutex mu;
  std::map<std::pair<int, int>, at::Tensor> gradients ABSL_GUARDED_BY(mu);  // by worker, parameter
  // By step, and which of its inputs.
  std::map<std::pair<const Step*, size_t>, Sight> sights ABSL_GUARDED_BY(mu);
  absl::Status status ABSL_GUARDED_BY(mu);  // the first error
  absl::Status late ABSL_GUARDED_BY(mu);    // the first that tells of a deadline

  void Fail(const absl::Status& error);
  void Saw(const Step& step, size_t input, const at::Tensor& gradient);
};

// What is different between two runs of `program`; empty if nothing.
std::string Difference(const Steps& program, State& want, State& got);

// What a worker does for one call.
class ProgramFrame {
 public:
  // `index`: the worker's.
  ProgramFrame(State* run, int index) : run_(*run), index_(index) {}
  virtual ~ProgramFrame() = default;

  Tensors Run(const Steps& steps, const std::vector<int>& results, Tensors arguments);

 protected:
  // The gradient of the body of a nested step by its value `x`, a leaf.
  using NestedGradient = std::function<at::Tensor(const at::Tensor& x)>;

  // May begin the call, and leave the rest of it to Join().
  virtual Tensors Call(const Step& call, Tensors arguments) = 0;
  virtual void CallAsync(const Step& call, Tensors arguments) = 0;
  virtual Tensors Join() = 0;
  virtual at::Tensor CallMm(int worker, const at::Tensor& a, const at::Tensor& b) = 0;
  // `passes` of them, at once.
  virtual void Backward(const Tensors& roots, bool retain_graph, int passes) = 0;
  virtual NestedGradient GradientOf(const Step& nested) = 0;
  // Runs the body of a saved step with the value.
  virtual std::function<void(const at::Tensor& x)> BodyOf(const Step& saved) = 0;
  virtual bool Broken() { return false; }

  // The body of a nested step, down to the roots of its backward.
  Tensors NestedRoots(const Step& nested, const at::Tensor& x);

  State& run_;
  const int index_;

 private:
  class Values;
  void RunStep(const Step& step, Values& values);
  void Send(const Step& call, Values& values);
  void RunNested(const Step& nested, Values& values);
  at::Tensor RunSaved(const Step& saved, const at::Tensor& x);
};

class LocalFrame final : public ProgramFrame {
 public:
  using ProgramFrame::ProgramFrame;

 private:
  Tensors Call(const Step& call, Tensors arguments) override;
  void CallAsync(const Step& call, Tensors arguments) override;
  Tensors Join() override { return std::exchange(pending_, {}); }
  at::Tensor CallMm(int worker, const at::Tensor& a, const at::Tensor& b) override;
  void Backward(const Tensors& roots, bool retain_graph, int passes) override;
  NestedGradient GradientOf(const Step& nested) override;
  std::function<void(const at::Tensor& x)> BodyOf(const Step& saved) override;

  Tensors pending_;
};

// On a worker of a job.
class DistributedFrame final : public ProgramFrame {
 public:
  DistributedFrame(State* run, int index, Worker* worker, CallOptions options)
      : ProgramFrame(run, index), worker_(*worker), options_(options) {}

  // Lets the worker run calls of programs. It is worker `index`.
  static absl::Status Register(Worker& worker, int index);
  // Has the worker put its gradients into `run`.
  static absl::Status TakeGradients(Worker& from, const std::string& worker, const Context& context,
                                    State* run);

 private:
  Tensors Call(const Step& call, Tensors arguments) override;
  void CallAsync(const Step& call, Tensors arguments) override;
  Tensors Join() override;
  at::Tensor CallMm(int worker, const at::Tensor& a, const at::Tensor& b) override;
  void Backward(const Tensors& roots, bool retain_graph, int passes) override;
  NestedGradient GradientOf(const Step& nested) override;
  std::function<void(const at::Tensor& x)> BodyOf(const Step& saved) override;
  // On a worker that was called.
  bool Broken() override { return run_.broken && index_ != 0; }

  Future<Message> Start(const Step& call, Tensors arguments);
  Tensors Take(Future<Message> reply);
  std::string NameOf(int worker) const {
    return worker == kNewcomer ? run_.newcomer : WorkerName(worker);
  }

  Worker& worker_;
  const CallOptions options_;
  std::vector<Future<Message>> pending_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_INTEGRATION_PROPERTY_FRAME_H_
