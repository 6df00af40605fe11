// The worker "cc" of cross_language_test: has a parameter.
//
//   worker_cc RENDEZVOUS
#include "core/worker/worker.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>

#include <cstdio>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace distgrad {
namespace {

absl::Status Run(const char* rendezvous) {
  const at::Tensor weight = at::tensor({5.0f, 6.0f}).requires_grad_();
  WorkerOptions options;
  options.name = "cc";
  options.rank = 2;
  options.world_size = 3;
  options.rendezvous = rendezvous;
  absl::StatusOr<std::unique_ptr<Worker>> created = Worker::Create(options);
  if (!created.ok()) return created.status();
  Worker& worker = **created;

  absl::Status status =
      worker.Register("forward", [&](Request& request) -> absl::StatusOr<Message> {
        Message reply;
        reply.tensors.push_back(at::mul(request.message.tensors.at(0), weight));
        return reply;
      });
  status.Update(worker.Register("gradient", [&](Request& request) -> absl::StatusOr<Message> {
    Message reply;
    absl::StatusOr<at::Tensor> gradient = request.context.Gradient(weight);
    if (!gradient.ok()) return gradient.status();
    reply.tensors.push_back(*std::move(gradient));
    return reply;
  }));
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  status.Update(worker.Barrier(deadline));
  if (status.ok()) status = worker.Shutdown(deadline);
  return status;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const absl::Status status = distgrad::Run(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "worker cc: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
