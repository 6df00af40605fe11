// Processes that compute the same thing together: each is one rank of a group, and all call the
// same collectives in the same order. On the CPU it is c10d's Gloo that adds, and in builds with
// CUDA, on GPUs, NCCL.
//
//   absl::StatusOr<std::shared_ptr<ProcessGroup>> group =
//       ProcessGroup::Create({.name = "replicas", .store = store, .rank = 1, .size = 2});
//   absl::Status status = (*group)->Average({loss});
//
// If a rank dies or fails, the others get an error, with its reason if it gave one. Over Gloo they
// get it at once. Over NCCL they ask the store once a second whether a rank has failed; that one
// was killed is noticed at once where NCCL loses a connection by it, and else after `timeout`. If a
// rank is merely stopped, they get an error after `timeout`. After an error no rank can tell which
// collectives the others have seen: it is the result of all later calls too, and the only way on is
// a new group, which may have the same name and store.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_PROCESS_GROUP_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_PROCESS_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/membership/store.h"
#include "core/net/cluster_key.h"

namespace distgrad {

class Certificates;  // core/net/certificates.h

struct ProcessGroupOptions {
  // The group's name, for messages; no two groups at a time have the same one in a store.
  std::string name = "default";
  // The store of the rendezvous of its ranks; StoreOfC10d() makes one of c10d's.
  std::shared_ptr<Store> store = nullptr;
  int rank = 0;
  int size = 1;
  // "gloo"; or "nccl", on the GPU that is the current one of the thread that calls Create().
  std::string backend = "gloo";
  // The limit for each collective, of which the average of a sparse tensor is several.
  absl::Duration timeout = absl::Minutes(10);
  // For all ranks to come, and to connect.
  absl::Duration join_timeout = absl::Minutes(10);
  // An address, a name, or an interface ("eth0") of this machine, at which the others reach
  // it. "": DISTGRAD_HOST, or "127.0.0.1"; Worker::host() has what the worker beside it listens on,
  // and JoinProcessGroup() finds the address by which this machine reaches the store.
  std::string host = {};
  // The key of the job. With one, which all ranks have, "gloo" lets no other process in and
  // encrypts every byte between the ranks. Unset: that of this process's environment
  // (LoadClusterKey()), or none; Worker::cluster_key() has that of the worker beside it, and
  // JoinProcessGroup() gives it itself. An empty key: none, whatever the environment has; then any
  // peer that reaches Gloo there can read and disturb the group. "nccl" cannot encrypt, with a key
  // or without.
  std::optional<ClusterKey> cluster_key = std::nullopt;
  // The certificates of this process, which do the same, in the place of a key or beside one:
  // LoadCertificates() reads them, Worker::certificates() has those of the worker beside it, and
  // JoinProcessGroup() gives them itself. Null: those of this process's environment, or none.
  std::shared_ptr<Certificates> certificates = nullptr;
};

// Thread-safe; but it is for the callers to see to the same order on all ranks.
class ProcessGroup {
 public:
  // A collective in flight.
  struct Running;

  // Waits until all ranks have called it. kDeadlineExceeded names those that have not;
  // kFailedPrecondition: some ranks have a cluster key, and others another one or none, or
  // GLOO_DEVICE_TRANSPORT asks for Gloo's own TLS, which encrypts nothing (docs/security.md).
  // kUnavailable: another rank has failed meanwhile; one that has its group already may. What
  // reading the key or the certificates says, if the options have none.
  static absl::StatusOr<std::shared_ptr<ProcessGroup>> Create(ProcessGroupOptions options);

  // Waits for the collectives in flight, each until its time-out.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  // Where tensors of collectives are: with NCCL a GPU, else the CPU.
  c10::Device device() const { return device_; }

  // Returns OK, or the first error.
  absl::Status status() const;
  // The number of collectives that this rank has begun: ranks in step have the same number.
  int64_t collectives() const { return collectives_; }

  // Averages in place: each tensor becomes the average of those of all ranks. They have the same
  // shapes and dtypes on all ranks, and any strides, and are packed into few collectives. Shapes
  // are not compared: where their sizes differ, Gloo has an error, with a cluster key at once, and
  // without one after `timeout`.
  // Before anything begins, and the group goes on: kInvalidArgument unless all are half, bfloat16,
  // float, double or complex of the last two, and, over NCCL, dense and on a GPU; what MayBegin()
  // says. An error of this rank while the others wait for it, as a lack of memory, fails the group.
  absl::Status Average(absl::Span<const at::Tensor> tensors);

  // Broadcasts in place: each tensor becomes that of `root`. It is dense, and has any dtype; else
  // as above.
  absl::Status Broadcast(absl::Span<const at::Tensor> tensors, int root = 0);

  // OK if this thread may begin a collective now. Else the group's first error; or why it may not
  // now, kFailedPrecondition, and then nothing has failed: over NCCL its current stream is being
  // captured into a CUDA graph. `what` is for messages.
  absl::Status MayBegin(absl::string_view what);

  // Runs what this rank does while the other ranks wait for it, or soon will: what precedes a
  // collective, and collectives themselves. An error of `part`, or what it throws, fails the group,
  // so that they do not wait until their time-out; then the group's error is the result. Nothing
  // runs once the group has failed. `what` is for messages. May be nested.
  absl::Status RunForOthers(absl::string_view what, absl::FunctionRef<absl::Status()> part);

  // Begins to add up a tensor, without gaps or sparse, in place; it is not to be touched until
  // Wait() has returned. `what` is for messages, and outlives that.
  absl::StatusOr<std::shared_ptr<Running>> BeginSum(const at::Tensor& tensor,
                                                    const std::string& what);
  // Waits until a sum has ended, also one of GPUs.
  absl::Status Wait(Running& running);

  // Fails the group, as this rank cannot go on: all later calls fail with `why`, which is not OK,
  // those in flight end, and so do those of the others, with the words of `why`: over Gloo at once,
  // over NCCL within a second or two. The first wins.
  void Fail(const absl::Status& why);

 private:
  struct Backend;

  ProcessGroup(ProcessGroupOptions options, c10::Device device);

  absl::StatusOr<std::shared_ptr<Running>> Begin(const at::Tensor& tensor, const std::string& what,
                                                 int root);
  // kInvalidArgument for a tensor that the backend does not take.
  absl::Status CheckTensor(const at::Tensor& tensor, absl::string_view what) const;
  // `timeout`: what a rank that is late has exceeded.
  absl::Status Failed(std::exception_ptr exception, absl::string_view what, absl::Duration timeout);

  // Constant after construction.
  const ProcessGroupOptions options_;
  const c10::Device device_;
  const std::string who_;  // "process group 'replicas' (rank 1 of 2, gloo)"

  std::atomic<int64_t> collectives_{0};
  // Constant after Create.
  std::shared_ptr<Store> store_;  // of this start of the group alone
  std::unique_ptr<Backend> backend_;

  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_PROCESS_GROUP_H_
