// Workers of one process that run closures for each other, and what the tests of backward compare
// with. Since all share the process, a closure may use whatever the test has.
//
//   Team team(3);
//   Context context = team[0].NewContext();
//   at::Tensor y = team.Run(0, 1, context, [&](Tensors in, Request&) { ... }, {x})[0];
//   absl::Status done = context.Backward({y.sum()});
#ifndef DISTGRAD_TESTS_INTEGRATION_TEAM_H_
#define DISTGRAD_TESTS_INTEGRATION_TEAM_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tests/testing/cluster.h"

namespace distgrad {

using Tensors = std::vector<at::Tensor>;

// Thread-safe.
class Team {
 public:
  using Function = std::function<absl::StatusOr<Tensors>(Tensors, Request&)>;

  explicit Team(int workers, ClusterOptions options = {});

  int size() const { return cluster_.size(); }
  Worker& operator[](int i) { return cluster_[i]; }
  Cluster& cluster() { return cluster_; }
  void Kill(int i);

  // Worker `from` has worker `to` run `function`.
  Future<Message> Start(int from, int to, const CallOptions& options, Function function,
                        Tensors arguments);
  absl::StatusOr<Tensors> Try(int from, int to, const CallOptions& options, Function function,
                              Tensors arguments);
  // The same, which must succeed.
  Tensors Run(int from, int to, const Context& context, Function function, Tensors arguments);

  // The gradient that a worker holds; undefined if it holds none.
  at::Tensor Gradient(int worker, const Context& context, const at::Tensor& leaf);

  // Waits until no pass runs on any worker, and no worker knows of more than `contexts` contexts;
  // a failure of the test if that takes long.
  void AwaitQuiet(size_t contexts);

 private:
  bool alive(int i);

  absl::Mutex mu_;
  std::vector<bool> killed_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Function>> functions_ ABSL_GUARDED_BY(mu_);
  // Last: some of them may still run when it ends.
  Cluster cluster_;
};

// Polls, for what nothing announces. False after a time that no working test needs.
bool Eventually(const std::function<bool()>& condition);

at::Tensor Leaf(at::IntArrayRef sizes, int seed, at::ScalarType type = at::kFloat);

// What torch's own engine gives for the leaves; undefined where it gives none.
Tensors Reference(const at::Tensor& root, const Tensors& leaves);

// Of type, layout, shape and elements equal to the last bit; or both undefined.
void ExpectSame(const at::Tensor& got, const at::Tensor& want);
// context.Gradient(leaf), undefined for none.
at::Tensor GradientOf(const Context& context, const at::Tensor& leaf);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_INTEGRATION_TEAM_H_
