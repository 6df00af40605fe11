// The example's network, trained for 50 steps over workers and in one process with the same
// seed: losses, gradients and parameters are the same to the last bit. The workers are threads
// of one process, over each transport, and processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ATen/ops/randint.h"
#include "ATen/ops/randn.h"
#include "absl/strings/str_cat.h"
#include "core/worker/worker.h"
#include "examples/distributed.h"
#include "examples/single.h"
#include "tests/testing/child_process.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

constexpr int kSteps = 50;
constexpr uint64_t kSeed = 3;
constexpr double kLearningRate = 0.05;

// What a step leaves on a worker, for comparison: the gradients of its parameters, in order.
absl::Status RegisterGradients(Worker* worker, const StageServer* stage) {
  return worker->Register("gradients", [stage](Request& r) -> absl::StatusOr<Message> {
    Message reply;
    for (const at::Tensor& parameter : stage->parameters()) {
      absl::StatusOr<at::Tensor> gradient = r.context.Gradient(parameter);
      if (!gradient.ok()) return gradient.status();
      reply.tensors.push_back(*gradient);
    }
    return reply;
  });
}

std::vector<Batch> Batches() {
  std::vector<Batch> batches;
  for (int i = 0; i < kSteps; ++i) {
    at::Generator generator = at::detail::createCPUGenerator(i);
    batches.push_back({at::randn({8, 1, 28, 28}, generator),
                       at::randint(10, {8}, generator, at::TensorOptions(at::kLong))});
  }
  return batches;
}

// Trains over the workers, worker 0 being `leader`, and in this process; compares each step.
void TrainBothWays(Worker& leader) {
  DistributedLearner distributed(&leader, /*micro_batches=*/1);
  SingleLearner single(kSeed);
  const Stage model = *Stage::Create(0, 1, kSeed);  // for the gradients of the first step
  bool first = true;
  for (const Batch& batch : Batches()) {
    if (std::exchange(first, false)) {
      const Context context = leader.NewContext();
      const CallOptions in_context{.context = &context};
      const absl::StatusOr<at::Tensor> loss = distributed.Gradients(context, batch);
      ASSERT_TRUE(loss.ok()) << loss.status();
      Loss(model.Forward(batch.images), batch.labels).backward();
      size_t parameter = 0;
      for (const std::string& worker : leader.names()) {
        auto gradients = leader.Call(worker, "gradients", {}, in_context);
        ASSERT_TRUE(gradients.ok()) << gradients.status();
        for (const at::Tensor& gradient : gradients->tensors) {
          EXPECT_TRUE(gradient.equal(model.parameters()[parameter].grad()))
              << "parameter " << parameter << ", on " << worker;
          ++parameter;
        }
      }
      EXPECT_EQ(parameter, model.parameters().size());
    }
    const absl::StatusOr<double> loss = distributed.Step(batch, kLearningRate);
    ASSERT_TRUE(loss.ok()) << loss.status();
    ASSERT_EQ(*loss, *single.Step(batch, kLearningRate));
  }
  const at::Tensor images = Batches()[0].images;
  const absl::StatusOr<at::Tensor> scores = distributed.Predict(images);
  ASSERT_TRUE(scores.ok()) << scores.status();
  EXPECT_TRUE(scores->equal(*single.Predict(images)));
}

struct Case {
  std::string transport;
  int workers;
};

class TrainingOverThreadsTest : public ::testing::TestWithParam<Case> {};
class TrainingOverProcessesTest : public ::testing::TestWithParam<Case> {};

// ThreadSanitizer sees nothing of how TensorPipe's own transports order its threads.
bool CannotBeSeen(const std::string& transport) {
#ifdef __SANITIZE_THREAD__
  return transport == "tcp" || transport == "shm";
#else
  return false;
#endif
}

TEST_P(TrainingOverThreadsTest, EqualsTrainingInOne) {
  if (CannotBeSeen(GetParam().transport)) GTEST_SKIP() << "TensorPipe is not instrumented";
  Cluster cluster({.workers = GetParam().workers, .transport = GetParam().transport});
  std::vector<std::unique_ptr<StageServer>> stages;
  for (int i = 0; i < cluster.size(); ++i) {
    stages.push_back(*StageServer::Create(&cluster[i], kSeed));
    ASSERT_TRUE(RegisterGradients(&cluster[i], stages.back().get()).ok());
  }
  TrainBothWays(cluster[0]);
}

// One worker of the job that the test below leads. Returns its exit status.
absl::Status RunWorker(const std::string& rendezvous, const std::string& transport, int rank,
                       int world_size) {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(
      {.rendezvous = rendezvous, .rank = rank, .world_size = world_size, .transport = transport});
  if (!worker.ok()) return worker.status();
  const std::unique_ptr<StageServer> stage = *StageServer::Create(worker->get(), kSeed);
  absl::Status status = RegisterGradients(worker->get(), stage.get());
  // Those that do not lead wait for all of the training.
  const absl::Time deadline = absl::Now() + absl::Minutes(5);
  if (status.ok()) status = (*worker)->Barrier(deadline);
  if (status.ok() && rank == 0) TrainBothWays(**worker);
  if (status.ok()) status = (*worker)->Shutdown(deadline);
  return status;
}

TEST_P(TrainingOverProcessesTest, EqualsTrainingInOne) {
  if (CannotBeSeen(GetParam().transport)) GTEST_SKIP() << "TensorPipe is not instrumented";
  // A short name of its own: TEST_TMPDIR is shared by the cases.
  std::string file = absl::StrCat(std::getenv("TEST_TMPDIR"), "/rendezvous-XXXXXX");
  const int fd = mkstemp(file.data());
  ASSERT_GE(fd, 0);
  close(fd);
  unlink(file.c_str());
  const std::string rendezvous = absl::StrCat("file://", file);
  std::vector<std::unique_ptr<ChildProcess>> children;
  const int workers = GetParam().workers;
  for (int rank = 1; rank < workers; ++rank) {
    children.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
        "--worker", rendezvous, GetParam().transport, absl::StrCat(rank), absl::StrCat(workers)}));
  }
  const absl::Status status = RunWorker(rendezvous, GetParam().transport, 0, workers);
  EXPECT_TRUE(status.ok()) << status;
  for (auto& child : children) EXPECT_EQ(child->Wait(), 0);
  unlink(file.c_str());
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  return absl::StrCat(info.param.transport, "_", info.param.workers);
}

INSTANTIATE_TEST_SUITE_P(Transports, TrainingOverThreadsTest,
                         ::testing::Values(Case{"inproc", 2}, Case{"inproc", 5}, Case{"socket", 2},
                                           Case{"tcp", 2}, Case{"shm", 2}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Transports, TrainingOverProcessesTest,
                         ::testing::Values(Case{"socket", 2}, Case{"socket", 3}, Case{"tcp", 2},
                                           Case{"shm", 2}),
                         CaseName);

}  // namespace

int RunChild(char** arguments) {
  const absl::Status status =
      RunWorker(arguments[0], arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3]));
  if (!status.ok()) std::fprintf(stderr, "worker: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 6 && std::string(argv[1]) == "--worker") return distgrad::RunChild(argv + 2);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
