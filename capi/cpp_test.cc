// The C++ wrapper, over the library as programs see it.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "distgrad/distgrad.hpp"
#include "gtest/gtest.h"
#include "tests/testing/trace_events.h"

namespace {

dg_code CodeOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const dg::Error& error) {
    return error.code();
  }
  return DG_OK;
}

TEST(CppTest, Operators) {
  const dg::Tensor x = dg::Tensor::From<float>({3, 1, 2}, {3});
  EXPECT_EQ(x.shape(), std::vector<int64_t>{3});
  EXPECT_EQ(x.device(), "cpu");
  EXPECT_EQ(dg::Op("aten::add.Tensor", {x, 1.5}).data<float>()[0], 4.5f);
  EXPECT_EQ(dg::Op("aten::cat", {std::vector<dg::Tensor>{x, x}}).element_count(), 6);
  const std::vector<dg::Tensor> sorted = dg::Ops("aten::sort", {x}).tensors();
  ASSERT_EQ(sorted.size(), 2u);
  EXPECT_EQ(sorted[0].data<float>()[0], 1);
  EXPECT_EQ(sorted[1].data<int64_t>()[0], 1);
  EXPECT_EQ(CodeOf([&] { dg::Op("aten::nothing", {x}); }), DG_NOT_FOUND);
  dg::CheckFunctional("aten::sort");
  EXPECT_EQ(CodeOf([&] { dg::CheckFunctional("aten::add_.Tensor"); }), DG_PERMISSION_DENIED);
  EXPECT_EQ(dg::AbiVersion() >> 16, uint32_t{DG_ABI_MAJOR});
  EXPECT_FALSE(dg::TorchVersion().empty());
  EXPECT_EQ(CodeOf([&] { x.data<double>(); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { dg::Tensor::From<float>({1}, {2}); }), DG_INVALID_ARGUMENT);
  dg::Tensor leaf = x;  // the same tensor
  leaf.RequireGrad();
  EXPECT_TRUE(x.requires_grad());
  EXPECT_FALSE(x.Detach().requires_grad());
  const dg::NoGrad no_grad;
  EXPECT_FALSE(dg::Op("aten::exp", {x}).requires_grad());
  {
    const dg::EnableGrad enable_grad;
    EXPECT_TRUE(dg::Op("aten::exp", {x}).requires_grad());
  }
  EXPECT_FALSE(dg::GradEnabled());
}

TEST(CppTest, ResultsThatAreNotTensors) {
  const dg::Tensor x = dg::Tensor::From<float>({3, 1, 2}, {3});
  const dg::Values sum = dg::Ops("aten::item", {dg::Op("aten::sum", {x})});
  ASSERT_EQ(sum.size(), 1u);
  EXPECT_EQ(sum.at(0).kind, uint64_t{DG_VALUE_REAL});
  EXPECT_EQ(sum.at(0).as.real, 6);
  EXPECT_EQ(CodeOf([&] { sum.tensor(0); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { sum.tensors(); }), DG_INVALID_ARGUMENT);  // rather than none
  EXPECT_EQ(CodeOf([&] { sum.at(1); }), DG_INVALID_ARGUMENT);
  const dg::Values pair = dg::Ops("aten::split.Tensor", {x, 2});
  ASSERT_EQ(pair.size(), 1u);  // a list
  EXPECT_EQ(pair.tensors().size(), 2u);
}

// A pointer is no bool: an operator that takes a number for a tensor would compute something else.
static_assert(!std::is_constructible_v<dg::Value, dg_tensor*>);
static_assert(!std::is_constructible_v<dg::Value, const void*>);
static_assert(std::is_constructible_v<dg::Value, bool>);
static_assert(std::is_constructible_v<dg::Value, const char*>);

TEST(CppTest, MemoryAndOtherLibraries) {
  float elements[4] = {1, 2, 3, 4};
  int destroyed = 0;
  {
    const dg::Tensor columns =
        dg::Tensor::FromMemory(elements, DG_FLOAT32, {2, 2}, {1, 2}, [&] { ++destroyed; });
    EXPECT_EQ(columns.strides(), (std::vector<int64_t>{1, 2}));
    const dg::Tensor same = dg::Tensor::FromTorch(columns.torch());
    EXPECT_EQ(same.data<float>(), elements);
    const dg::Tensor back = dg::Tensor::FromDlpack(same.ToDlpack());
    elements[1] = 5;
    EXPECT_EQ(dg::Op("aten::sum", {back}).data<float>()[0], 13);
    EXPECT_EQ(destroyed, 0);
  }
  EXPECT_EQ(destroyed, 1);
  EXPECT_EQ(
      CodeOf([&] { dg::Tensor::FromMemory(elements, DG_FLOAT32, {-1}, {}, [&] { ++destroyed; }); }),
      DG_INVALID_ARGUMENT);
  EXPECT_EQ(destroyed, 2);
  EXPECT_EQ(CodeOf([&] {
              dg::Tensor::FromMemory(elements, DG_FLOAT32, {4}, {1, 1}, nullptr);
            }),
            DG_INVALID_ARGUMENT);
}

// Of two ranks on one worker; the other workers of the job have no stage.
void Pipelines(dg::Worker& worker) {
  dg::Schedule schedule = dg::Schedule::OneForwardOneBackward(2, 2);
  dg::ScheduleData data = schedule.data();
  EXPECT_EQ(data.micro_batches, 2u);
  EXPECT_EQ(data.rank_of_stage, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(data.max_activations, (std::vector<uint32_t>{2, 1}));
  const auto time = [](const dg_action& action) { return action.kind <= 1 ? 1.0 : 0.0; };
  const dg::Timeline timeline = dg::Schedule(data).Simulate(time);
  EXPECT_EQ(timeline.end, 6);
  EXPECT_EQ(timeline.busy, (std::vector<double>{4, 4}));
  EXPECT_EQ(timeline.max_activations, data.max_activations);
  EXPECT_EQ(timeline.starts[0].size(), data.lists[0].size());
  EXPECT_THROW(schedule.Simulate([](const dg_action&) -> double { throw std::logic_error("no"); }),
               std::logic_error);
  EXPECT_EQ(dg::Schedule::GPipe(1, 3).data().lists[0].size(), 6u);
  EXPECT_EQ(dg::Schedule::GPipe(1, 3).WithSteps().data().lists[0].back().kind, DG_ACTION_STEP);
  EXPECT_EQ(dg::Schedule::ZeroBubbleH1(1, 1).data().lists[0].size(), 2u);
  EXPECT_EQ(dg::Schedule::ZeroBubbleH2(1, 1).data().lists[0].size(), 2u);
  EXPECT_EQ(dg::Schedule::ZeroBubble(2, 8, 3).data().max_activations,
            (std::vector<uint32_t>{4, 4}));
  EXPECT_EQ(dg::Schedule::InterleavedOneForwardOneBackward(1, 2, 1).data().lists[0].size(), 4u);
  data.max_activations.pop_back();
  EXPECT_EQ(CodeOf([&] { dg::Schedule{data}; }), DG_INVALID_ARGUMENT);

  // y = (2 x w)^2 with the step of the schedule on the first stage: w -= its gradient.
  data.max_activations.clear();
  data.lists[0].push_back({DG_ACTION_STEP, 0, 0});
  data.lists[1].push_back({DG_ACTION_STEP, 1, 0});
  dg::Tensor w = dg::Tensor::From<float>({1}, {1});
  w.RequireGrad();
  bool fails = false;
  std::map<uint64_t, dg::PipelineStage> stages;
  stages[0].forward = [&](const std::vector<dg::Tensor>& in) -> std::vector<dg::Tensor> {
    if (fails) throw dg::Error(DG_DATA_LOSS, "the dog ate it");
    return {dg::Op("aten::mul.Tensor", {in[0], w})};
  };
  stages[0].step = [&](dg::ContextRef context) {
    const dg::NoGrad no_grad;
    const auto gradients = context.Gradients();
    ASSERT_EQ(gradients.size(), 1u);
    // There and back, as a step that clips them would go one way.
    context.SetGradient(w, dg::Op("aten::mul.Tensor", {gradients[0].second, 2}));
    context.SetGradient(w, dg::Op("aten::div.Tensor", {context.Gradient(w), 2}));
    EXPECT_NE(context.id(), 0u);
    dg::Op("aten::sub_.Tensor", {w, context.Gradient(w)});
  };
  stages[1].forward = [](const std::vector<dg::Tensor>& in) -> std::vector<dg::Tensor> {
    return {dg::Op("aten::mul.Tensor", {in[0], 2})};
  };
  stages[1].loss = [](const std::vector<dg::Tensor>& out, const std::vector<dg::Tensor>& targets) {
    return dg::Op("aten::mse_loss", {out[0], targets[0]});
  };
  stages[1].step = [](dg::ContextRef) {};
  std::vector<uint32_t> kinds;
  stages[1].on_action = [&](const dg_stage_span& span) {
    EXPECT_EQ(span.rank, 1u);
    EXPECT_LE(span.begin_ns, span.end_ns);
    kinds.push_back(span.action->kind);
    if (fails) throw dg::Error(DG_DATA_LOSS, "nobody listens");
  };
  stages[1].recompute = true;
  const dg::PipelineStages made(worker, "model", stages);
  EXPECT_EQ(CodeOf([&] { dg::PipelineStages(worker, "model", stages); }), DG_ALREADY_EXISTS);
  const dg::Pipeline pipeline(worker, "model", dg::Schedule(data), {"worker0", "worker0"});
  const dg::Tensor x = dg::Tensor::From<float>({1, 2}, {2});
  const dg::Tensor y = dg::Tensor::From<float>({0, 0}, {2});
  {
    const dg::Context context(worker);
    const dg::PipelineResult result = pipeline.Train(dg::ContextRef(context), {x}, {y});
    ASSERT_EQ(result.losses.size(), 2u);
    EXPECT_EQ(result.losses[0].data<float>()[0], 4);
    EXPECT_EQ(result.losses[1].data<float>()[0], 16);
    EXPECT_EQ(result.loss.data<float>()[0], 10);
    EXPECT_TRUE(result.outputs.empty());
    EXPECT_EQ(w.data<float>()[0], 1 - (8 + 32) / 2);
    ASSERT_EQ(kinds.size(), data.lists[1].size());
    for (size_t i = 0; i < kinds.size(); ++i) EXPECT_EQ(kinds[i], data.lists[1][i].kind);
  }
  std::map<uint64_t, dg::PipelineStage> skipping;
  skipping[0].forward = [&](const std::vector<dg::Tensor>& in) -> std::vector<dg::Tensor> {
    return {in[0], in[0]};
  };
  skipping[0].skips = {2};
  skipping[1].forward = stages[1].forward;
  skipping[2].forward = [](const std::vector<dg::Tensor>& in) -> std::vector<dg::Tensor> {
    return {dg::Op("aten::add.Tensor", {in[0], in[1]})};
  };
  skipping[2].inputs = 2;
  const dg::PipelineStages of_skips(worker, "skips", skipping);
  const dg::PipelineResult sums =
      dg::Pipeline(worker, "skips", dg::Schedule::GPipe(3, 1), {"worker0", "worker0", "worker0"})
          .Evaluate({x});
  ASSERT_EQ(sums.outputs.size(), 1u);
  EXPECT_EQ(sums.outputs[0][0].data<float>()[1], 2 * 2 + 2);
  const dg::PipelineResult result = pipeline.Evaluate({x});
  ASSERT_EQ(result.outputs.size(), 2u);
  EXPECT_EQ(result.outputs[1][0].data<float>()[0], 2 * 2 * -19);
  EXPECT_FALSE(result.loss);
  {
    const dg::Context of_first(worker), of_second(worker);
    dg::PipelineStep first = pipeline.Start(of_first, {x}, {y});
    dg::PipelineStep second = pipeline.Start(of_second, {x}, {y});
    EXPECT_EQ(CodeOf([&] { pipeline.Train(of_first, {x}, {y}); }), DG_FAILED_PRECONDITION);
    dg::PipelineStep moved = std::move(first);
    EXPECT_EQ(second.Wait().losses[0].data<float>()[0], 4 * 361 * 361);
    EXPECT_EQ(moved.Wait().losses[0].data<float>()[0], 4 * 19 * 19);
    EXPECT_EQ(w.data<float>()[0], -6859);  // -19 to the third
    EXPECT_EQ(CodeOf([&] { second.Wait(); }), DG_FAILED_PRECONDITION);
  }
  fails = true;
  try {
    pipeline.Evaluate({x}, {y});
    ADD_FAILURE();
  } catch (const dg::Error& error) {
    EXPECT_EQ(error.code(), DG_DATA_LOSS);
    const std::string text = error.what();
    EXPECT_NE(text.find("forward of stage 0, micro-batch 0 on worker 'worker0'"), text.npos)
        << text;
  }
}

TEST(CppTest, NestedCallsGetWhatIsLeft) {
  dg_request given = {};
  given.timeout_ms = 1'000'000;
  const dg::Request request(&given);
  EXPECT_LE(request.Nested().timeout_ms, 1'000'000);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (request.Nested().timeout_ms == 1'000'000 && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_LT(request.Nested().timeout_ms, 1'000'000);
  given.timeout_ms = DG_FOREVER;
  EXPECT_EQ(request.Nested().timeout_ms, DG_FOREVER);
  given.timeout_ms = 1;
  EXPECT_EQ(request.Nested().timeout_ms, 1);  // 0 would be the default
}

TEST(CppTest, WaitLetsExceptionsThrough) {
  bool ran = false;
  dg::Wait([&] { ran = true; });
  EXPECT_TRUE(ran);
  EXPECT_THROW(dg::Wait([] { throw std::runtime_error("not yet"); }), std::runtime_error);
}

TEST(CppTest, DataParallel) {
  const std::vector<std::string> devices = {"cpu", "cpu"};
  const std::vector<dg_str> names = {dg::Str("cpu"), dg::Str("cpu")};
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  options.devices = names.data();
  options.device_count = names.size();
  const dg::Tensor x = dg::Tensor::From<float>({1, 2, 3, 4}, {4});
  const dg::Tensor scale = dg::Tensor::From<float>({5}, {1});
  const dg::Tensor shift = dg::Tensor::From<float>({7}, {1});
  const dg_tensor* const buffer = shift.get();
  options.buffers = &buffer;
  options.buffer_count = 1;
  const dg::DataParallel parallel({scale}, options, [](const dg::Replica& replica) {
    EXPECT_EQ(replica.device(), "cpu");
    const dg::Tensor y = dg::Op("aten::mul.Tensor", {replica.inputs()[0], replica.parameters()[0]});
    if (y.data<float>()[0] == 0) throw dg::Error(DG_OUT_OF_RANGE, "zero");
    return std::vector<dg::Tensor>{dg::Op("aten::add.Tensor", {y, replica.buffers()[0]})};
  });
  const dg::Tensor y = parallel.Forward({x})[0];
  EXPECT_EQ(y.shape(), std::vector<int64_t>{4});
  EXPECT_EQ(y.data<float>()[3], 27);
  EXPECT_EQ(CodeOf([&] { parallel.Forward({x}, 2); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { parallel.Forward({dg::Op("aten::zeros_like", {x})}); }), DG_OUT_OF_RANGE);

  const std::vector<dg::Tensor> parts = dg::Scatter(x, devices, 0, {1, 3});
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].element_count(), 3);
  EXPECT_EQ(dg::Scatter(scale, devices).size(), 1u);
  EXPECT_EQ(CodeOf([&] { dg::Scatter(x, devices, 0, {4}); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(dg::Gather(parts).data<float>()[3], 4);
  const auto copies = dg::Broadcast({x, scale}, devices);
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(dg::ReduceAdd(copies)[1].data<float>()[0], 10);
  EXPECT_EQ(CodeOf([&] { dg::ReduceAdd({{x}, {}}); }), DG_INVALID_ARGUMENT);
}

// One of two ranks.
void Replicas(dg::Worker& worker, float scale) {
  dg::ProcessGroup group(worker);
  EXPECT_EQ(group.size(), 2u);
  EXPECT_EQ(group.rank(), worker.rank());
  dg::Tensor w = dg::Tensor::From<float>({scale}, {1});
  group.Average({w});
  EXPECT_EQ(w.data<float>()[0], 2);
  w.data<float>()[0] = scale;
  group.Broadcast({w}, 1);
  EXPECT_EQ(w.data<float>()[0], 3);
  w.RequireGrad();
  dg::GradientAverager averager(group, {w});
  const dg::Context context(worker);
  context.Backward({dg::Op("aten::mul.Tensor", {w, static_cast<double>(scale)})});
  averager.Average(context);
  EXPECT_EQ(context.Gradient(w).data<float>()[0], 2);
  const dg::Context overlapped(worker);
  averager.AverageInBackward(overlapped);
  overlapped.Backward({dg::Op("aten::mul.Tensor", {w, static_cast<double>(scale)})});
  averager.Average(overlapped);
  EXPECT_EQ(overlapped.Gradient(w).data<float>()[0], 2);
  EXPECT_FALSE(averager.Join(dg::Context(worker)));
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  const std::string name = "alone" + std::to_string(worker.rank());
  options.name = dg::Str(name);
  options.size = 1;
  dg::ProcessGroup alone(worker, options);
  alone.Fail(DG_DATA_LOSS, "the disk is full");
  EXPECT_EQ(CodeOf([&] { alone.Average({w}); }), DG_DATA_LOSS);
  dg::ReportFailure(dg::Error(DG_DATA_LOSS, "to nobody"));
}

TEST(CppTest, RandomNumbersBeginAnew) {
  const auto number = [] {
    dg::ManualSeed(7);
    const dg::Tensor x = dg::Op("aten::randn", {std::vector<int64_t>{1}});
    return x.data<float>()[0];
  };
  EXPECT_EQ(number(), number());
}

// Whether replicas are made meanwhile or not, a thread draws the numbers that follow its seed.
TEST(CppTest, MakingReplicasLeavesRandomNumbersAlone) {
  const auto numbers = [] {
    dg::ManualSeed(7);
    std::vector<float> drawn;
    while (drawn.size() < 2000) {
      drawn.push_back(dg::Op("aten::rand", {std::vector<int64_t>{1}}).data<float>()[0]);
    }
    return drawn;
  };
  const std::vector<float> alone = numbers();
  const std::vector<dg_str> devices = {dg::Str("cpu"), dg::Str("cpu")};
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  options.devices = devices.data();
  options.device_count = devices.size();
  const dg::Tensor scale = dg::Tensor::From<float>({5}, {1});
  std::atomic<bool> enough{false};
  std::thread makes([&] {
    while (!enough) {
      const dg::DataParallel made({scale}, options,
                                  [](const dg::Replica& replica) { return replica.inputs(); });
    }
  });
  const std::vector<float> beside = numbers();
  enough = true;
  makes.join();
  EXPECT_EQ(beside, alone);
}

TEST(CppTest, ModesAndThreads) {
  EXPECT_TRUE(dg::GradEnabled());
  {
    const dg::NoGrad no_grad;
    EXPECT_FALSE(dg::GradEnabled());
  }
  const uint32_t before = dg::NumThreads();
  dg::SetNumThreads(2);
  EXPECT_EQ(dg::NumThreads(), 2u);
  EXPECT_EQ(CodeOf([] { dg::SetNumThreads(0); }), DG_INVALID_ARGUMENT);
  dg::SetNumThreads(before);
}

TEST(CppTest, TracesAndSeveralWorkers) {
  const std::string rendezvous = "file://" + std::string(getenv("TEST_TMPDIR")) + "/traced";
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.world_size = 1;
  options.rendezvous = dg::Str(rendezvous);
  dg::Worker worker(options);
  worker.Register("echo", [](const dg::Request& request) {
    if (request.payload().empty()) throw dg::Error(DG_OUT_OF_RANGE, "nothing");
    return dg::Message(std::string(request.payload()));
  });
  // What a handler calls in turn is given up with it, whatever it calls.
  worker.Register("nested", [&worker](const dg::Request& request) {
    const dg_call_options options = request.Nested();
    const auto echoes = worker.CallEach({"worker0"}, "echo", dg::Message("x"), options);
    return dg::Message(
        std::get<dg::Message>(echoes[0]).payload(),
        worker.CallOp("worker0", "aten::neg", {request.tensor(0)}, options).tensors());
  });
  {
    const dg::Tensor two = dg::Tensor::From<float>({2}, {1});
    const dg::Message reply = worker.Call("worker0", "nested", dg::Message("", {two}));
    EXPECT_EQ(reply.payload(), "x");
    EXPECT_EQ(reply.tensor(0).data<float>()[0], -2);
    dg::Cancellation cancellation;
    cancellation.Cancel();
    dg_call_options options = DG_CALL_OPTIONS_INIT;
    options.cancellation = cancellation.get();
    EXPECT_EQ(CodeOf([&] { worker.CallOp("worker0", "aten::neg", {two}, options); }), DG_CANCELLED);
    const auto given_up = worker.CallEach({"worker0"}, "echo", dg::Message("x"), options);
    EXPECT_EQ(std::get<dg::Error>(given_up[0]).code(), DG_CANCELLED);
  }
  // A handler runs the backward of its caller's context.
  {
    dg::Tensor leaf = dg::Tensor::From<float>({3}, {1});
    leaf.RequireGrad();
    worker.Register("train", [leaf](const dg::Request& request) {
      const dg::ContextRef context = request.context();
      dg_backward_options again = DG_BACKWARD_OPTIONS_INIT;
      again.flags = DG_BACKWARD_RETAIN_GRAPH;
      context.Backward({dg::Op("aten::sum", {leaf})}, again);
      context.BackwardAsync({dg::Op("aten::sum", {leaf})}).Get();
      return dg::Message(std::to_string(context.id()));
    });
    const dg::Context context(worker);
    const dg::Message reply = worker.Call("worker0", "train", dg::Message(), &context);
    EXPECT_EQ(reply.payload(), std::to_string(context.id()));
    EXPECT_EQ(context.Gradient(leaf).data<float>()[0], 2);
    EXPECT_EQ(CodeOf([&] { worker.Call("worker0", "train", dg::Message()); }), DG_INVALID_ARGUMENT);
  }
  EXPECT_EQ(CodeOf([&] { worker.StopTrace(); }), DG_FAILED_PRECONDITION);
  worker.StartTrace();
  const auto replies = worker.CallEach({"worker0", "nobody"}, "echo", dg::Message("x"));
  ASSERT_EQ(replies.size(), 2u);
  EXPECT_EQ(std::get<dg::Message>(replies[0]).payload(), "x");
  EXPECT_EQ(std::get<dg::Error>(replies[1]).code(), DG_NOT_FOUND);
  EXPECT_EQ(std::get<dg::Error>(replies[1]).origin(), uint32_t{DG_ORIGIN_DISTGRAD});
  EXPECT_EQ(CodeOf([&] { worker.Call("worker0", "echo", dg::Message()); }), DG_OUT_OF_RANGE);
  const absl::StatusOr<distgrad::TraceEvents> events = distgrad::ReadTraces({worker.StopTrace()});
  ASSERT_TRUE(events.ok()) << events.status();
  {
    std::vector<std::pair<uint32_t, std::string>> log;
    dg::SetLogSink(
        [&](uint32_t severity, std::string_view text) { log.emplace_back(severity, text); });
    dg_trace_options small = DG_TRACE_OPTIONS_INIT;
    small.max_bytes = 1;
    worker.StartTrace(small);
    worker.Call("worker0", "echo", dg::Message("x"));
    worker.StopTrace();
    dg::SetLogSink(nullptr);
    ASSERT_EQ(log.size(), 1u);
    EXPECT_EQ(log[0].first, uint32_t{DG_LOG_WARNING});
    EXPECT_NE(log[0].second.find("'worker0'"), std::string::npos) << log[0].second;
  }
  int calls = 0;
  for (const distgrad::TraceSlice& slice : events->slices) {
    if (slice.name != "echo") continue;
    ++calls;
    EXPECT_NE(OtherEnd(*events, slice), nullptr);
  }
  EXPECT_EQ(calls, 4);

  dg::Tensor x = dg::Tensor::From<float>({1}, {1});
  x.RequireGrad();
  dg_sgd_options sgd = DG_SGD_OPTIONS_INIT;
  dg::Optimizer optimizer(worker, "", {x}, sgd);
  optimizer.SetLearningRate(0.5);
  const dg::Context context(worker);
  context.Backward({dg::Op("aten::sum", {x})});
  optimizer.Step(context);
  EXPECT_EQ(x.data<float>()[0], 0.5f);
  const dg::Context second(worker);
  second.Backward({dg::Op("aten::sum", {x})});
  dg::SumGradients(worker, {context, second});
  EXPECT_EQ(context.Gradient(x).data<float>()[0], 2.0f);
  EXPECT_TRUE(second.Gradients().empty());
  EXPECT_EQ(CodeOf([&] { dg::SumGradients(worker, {context, context}); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { optimizer.SetLearningRate(-1); }), DG_INVALID_ARGUMENT);
  std::vector<std::pair<std::string, dg::Tensor>> state = optimizer.State();
  ASSERT_EQ(state.size(), 5u);  // without momentum there is nothing but options
  EXPECT_EQ(state[0].first, "param_groups.0.lr");
  EXPECT_EQ(state[0].second.data<double>()[0], 0.5);
  optimizer.LoadState(state);
  state.pop_back();
  EXPECT_EQ(CodeOf([&] { optimizer.LoadState(state); }), DG_INVALID_ARGUMENT);
  optimizer.Remove();
  EXPECT_EQ(CodeOf([&] { optimizer.Step(context); }), DG_NOT_FOUND);

  // Local ones, which have no worker.
  dg::Optimizer locals[] = {dg::Optimizer({x}, sgd), dg::Optimizer::Adam({x}),
                            dg::Optimizer::AdamW({x})};
  for (dg::Optimizer& local : locals) {
    const float before = x.data<float>()[0];
    local.Step(context);
    EXPECT_LT(x.data<float>()[0], before);
    EXPECT_EQ(CodeOf([&] { local.SetWorkers({"worker0"}); }), DG_FAILED_PRECONDITION);
  }
  // Those of a worker that was moved from are none, and no local ones.
  const std::string another = rendezvous + ".another";
  options.rendezvous = dg::Str(another);
  const auto moved = std::make_unique<dg::Worker>(options);
  const dg::Worker kept = std::move(*moved);
  EXPECT_EQ(CodeOf([&] { dg::Optimizer(*moved, "", {x}, sgd); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { dg::Optimizer::Adam(*moved, "", {x}); }), DG_INVALID_ARGUMENT);
  EXPECT_EQ(CodeOf([&] { dg::Optimizer::AdamW(*moved, "", {x}); }), DG_INVALID_ARGUMENT);
  // Calls in a context that was moved from are refused, rather than made without one.
  const auto from = std::make_unique<dg::Context>(worker);
  const dg::Context to = std::move(*from);
  const std::vector<std::function<void(const dg::Context* in)>> makes_call = {
      [&](const dg::Context* in) { worker.Call("worker0", "echo", dg::Message("x"), in); },
      [&](const dg::Context* in) { worker.CallAsync("worker0", "echo", dg::Message("x"), in); },
      [&](const dg::Context* in) { worker.CallOp("worker0", "aten::neg", {x}, in); },
      [&](const dg::Context* in) { worker.CallOpAsync("worker0", "aten::neg", {x}, in); },
      [&](const dg::Context* in) { worker.CallEach({"worker0"}, "echo", dg::Message("x"), in); }};
  for (const auto& call : makes_call) {
    EXPECT_EQ(CodeOf([&] { call(&to); }), DG_OK);
    EXPECT_EQ(CodeOf([&] { call(nullptr); }), DG_OK);
    EXPECT_EQ(CodeOf([&] { call(from.get()); }), DG_INVALID_ARGUMENT);
  }
}

TEST(CppTest, FilesAndCheckpoints) {
  const std::string folder = std::string(getenv("TEST_TMPDIR")) + "/checkpoints";
  const std::string rendezvous = folder + ".rendezvous";
  dg_worker_options of_worker = DG_WORKER_OPTIONS_INIT;
  const std::string uri = "file://" + rendezvous;
  of_worker.world_size = 1;
  of_worker.rendezvous = dg::Str(uri);
  dg::Worker worker(of_worker);
  const dg::Tensor buffer = dg::Tensor::From<float>({1, 2, 3}, {3});
  dg::Tensor weight = dg::Tensor::From<float>({4, 5}, {2});
  weight.RequireGrad();
  dg::Optimizer adam = dg::Optimizer::Adam(worker, "", {weight});
  const auto step = [&] {
    const dg::Context context(worker);
    context.Backward({dg::Op("aten::sum", {dg::Op("aten::square", {weight})})});
    adam.Step(context);
  };
  step();

  // Files.
  const dg::TensorMap tensors = {{"buffer", buffer}, {"weight", weight}};
  const std::string path = folder + ".safetensors";
  dg::SaveSafetensors(tensors, path, {{"made by", "C++"}});
  EXPECT_EQ(dg::LoadSafetensors(path).at("buffer").data<float>()[2], 3);
  const dg::SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().at("weight").shape, std::vector<int64_t>{2});
  EXPECT_EQ(file.tensors().at("weight").dtype, DG_FLOAT32);
  EXPECT_EQ(file.tensors().at("buffer").bytes, 12u);
  EXPECT_EQ(file.metadata().at("made by"), "C++");
  buffer.data<float>()[2] = 7;
  file.ReadInto("buffer", buffer);
  EXPECT_EQ(buffer.data<float>()[2], 3);
  buffer.data<float>()[2] = 7;
  dg::LoadSafetensorsInto(path, tensors);
  EXPECT_EQ(file.Read("buffer").data<float>()[0], buffer.data<float>()[0]);
  EXPECT_EQ(buffer.data<float>()[2], 3);
  EXPECT_EQ(CodeOf([&] { file.Read("none"); }), DG_NOT_FOUND);
  EXPECT_EQ(CodeOf([&] { dg::SafetensorsFile("/dev/null"); }), DG_INVALID_ARGUMENT);
  const std::string state = folder + ".adam.safetensors";
  adam.Save(tensors, state);
  adam.Load(state, tensors);
  EXPECT_EQ(CodeOf([&] { adam.Load(state, {}); }), DG_INVALID_ARGUMENT);

  // Checkpoints.
  int epoch = 3, loaded_epoch = 0;
  bool fails = false;
  dg::CheckpointPart part(worker,
                          {tensors,
                           {{"adam", &adam}},
                           [&]() -> dg::CheckpointValues {
                             if (fails) throw dg::Error(DG_OUT_OF_RANGE, "no values");
                             return {{"epoch", std::to_string(epoch)}};
                           },
                           [&](const dg::LoadedValues& loaded) {
                             if (fails) throw std::runtime_error("oh");
                             EXPECT_EQ(loaded.workers.at("worker0"), loaded.values);
                             loaded_epoch = std::stoi(loaded.values.at("epoch"));
                           }},
                          "cpp");
  dg_checkpoint_manager_options options = DG_CHECKPOINT_MANAGER_OPTIONS_INIT;
  options.name = DG_STR("cpp");
  dg::CheckpointManager checkpoints(worker, folder, options);
  EXPECT_EQ(CodeOf([&] { checkpoints.Load(); }), DG_NOT_FOUND);
  checkpoints.Save(1);
  const dg::Future written = checkpoints.SaveAsync(2);
  step();
  const float then = weight.data<float>()[1];
  EXPECT_TRUE(written.Wait());
  dg_message* reply = nullptr;
  dg::Check(dg_future_result(written.get(), &reply));
  const dg::LoadedCheckpoint loaded = checkpoints.Load();
  EXPECT_EQ(loaded.step, 2);
  EXPECT_NE(loaded.folder.find("step-000002"), std::string::npos);
  EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty() && loaded.mismatched.empty());
  EXPECT_EQ(loaded_epoch, 3);
  EXPECT_NE(weight.data<float>()[1], then);
  step();
  EXPECT_EQ(weight.data<float>()[1], then);  // to the last bit
  fails = true;
  EXPECT_EQ(CodeOf([&] { checkpoints.Save(3); }), DG_OUT_OF_RANGE);
  EXPECT_EQ(CodeOf([&] { checkpoints.Load(); }), DG_INTERNAL);
  part.Remove();
  EXPECT_EQ(CodeOf([&] { checkpoints.Save(3); }), DG_FAILED_PRECONDITION);
  const dg::CheckpointPart less(worker, {{{"weight", weight}, {"more", buffer}}}, "cpp");
  dg_checkpoint_load_options load = DG_CHECKPOINT_LOAD_OPTIONS_INIT;
  load.step = 1;
  load.flags = DG_CHECKPOINT_LOAD_NOT_STRICT;
  const dg::LoadedCheckpoint some = dg::LoadCheckpoint(worker, folder, load, options);
  EXPECT_EQ(some.step, 1);
  EXPECT_EQ(some.missing.size(), 1u);
  EXPECT_EQ(some.unexpected.size(), 2u);
  EXPECT_TRUE(some.mismatched.empty());
}

TEST(CppTest, Job) {
  const std::string rendezvous = "file://" + std::string(getenv("TEST_TMPDIR")) + "/rendezvous";
  const auto make = [&](uint32_t rank) {
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;
    options.rank = rank;
    options.world_size = 2;
    options.rendezvous = dg::Str(rendezvous);
    return dg::Worker(options);
  };
  std::thread back([&] {
    // What handlers use outlives the worker.
    dg::Responder kept(nullptr);
    std::thread answering;
    {
      dg::Worker worker = make(1);
      dg::Tensor scale = dg::Tensor::From<float>({5}, {1});
      scale.RequireGrad();
      worker.Register("scale", [&](const dg::Request& request) {
        if (request.tensor_count() == 0) throw dg::Error(DG_OUT_OF_RANGE, "no tensor");
        if (request.payload() == "throw") throw std::runtime_error("oh");
        return dg::Message("", {dg::Op("aten::mul.Tensor", {request.tensor(0), scale})});
      });
      worker.RegisterResponder("later", [&](const dg::Request& request, dg::Responder&& responder) {
        if (request.payload() == "throw") throw dg::Error(DG_DATA_LOSS, "oh");
        if (request.payload() == "drop") return;
        if (request.payload() == "pass on") {
          try {
            worker.Call("worker0", "refuse", dg::Message(), request.Nested());
          } catch (const dg::Error& error) {
            responder.Fail(error);
          }
          return;
        }
        if (request.payload() == "cancel") {
          kept = std::move(responder);
          request.OnCancel([&kept] { kept.Fail(DG_ABORTED, "nobody hears it"); });
          return;
        }
        answering = std::thread([request, to = std::move(responder)]() mutable {
          to.Answer(dg::Message(std::string(request.payload()) + "!"));
        });
      });
      dg::Optimizer optimizer = dg::Optimizer::Adam(worker, "", {scale});
      worker.Barrier();
      Replicas(worker, 3);
      worker.Serve();
      EXPECT_LT(scale.data<float>()[0], 5);
    }
    answering.join();
  });
  dg::Worker worker = make(0);
  EXPECT_EQ(worker.name(1), "worker1");
  dg::Tensor x = dg::Tensor::From<float>({2}, {1});
  x.RequireGrad();
  dg::Optimizer optimizer = dg::Optimizer::AdamW(worker, "", {x});
  worker.Register("refuse", [](const dg::Request&) -> dg::Message {
    throw dg::Error(DG_PERMISSION_DENIED, "not today");
  });
  worker.Barrier();
  try {
    worker.Call("worker1", "later", dg::Message("pass on"));
    ADD_FAILURE();
  } catch (const dg::Error& error) {
    EXPECT_EQ(error.code(), DG_PERMISSION_DENIED);
    EXPECT_EQ(error.origin(), uint32_t{DG_ORIGIN_HANDLER});
    EXPECT_EQ(error.rank(), 0u);  // where it arose
  }
  EXPECT_EQ(CodeOf([&] { worker.Call("worker1", "scale", dg::Message()); }), DG_OUT_OF_RANGE);
  EXPECT_EQ(CodeOf([&] { worker.Call("worker1", "scale", dg::Message("throw", {x})); }),
            DG_INTERNAL);
  {
    // Where nothing waits for it, the answer may come first.
    const dg::Future future = worker.CallAsync("worker1", "scale", dg::Message("", {x}));
    future.Cancel();
    const dg_code code = CodeOf([&] { future.Get(); });
    EXPECT_TRUE(code == DG_OK || code == DG_CANCELLED) << code;
  }
  worker.UpdateMembers();
  ASSERT_EQ(worker.members().size(), 2u);
  EXPECT_EQ(worker.members()[1].name, "worker1");
  EXPECT_EQ(worker.members()[1].rank, 1u);
  EXPECT_EQ(worker.Call("worker1", "later", dg::Message("soon")).payload(), "soon!");
  EXPECT_EQ(CodeOf([&] { worker.Call("worker1", "later", dg::Message("throw")); }), DG_DATA_LOSS);
  EXPECT_EQ(CodeOf([&] { worker.Call("worker1", "later", dg::Message("drop")); }), DG_INTERNAL);
  {
    dg::Cancellation cancellation;
    dg_call_options options = DG_CALL_OPTIONS_INIT;
    options.cancellation = cancellation.get();
    const dg::Future future = worker.CallAsync("worker1", "later", dg::Message("cancel"), options);
    cancellation.ThrowIfCancelled();
    int forgotten = 0, kept = 0;
    cancellation.Forget(cancellation.OnCancel([&] { ++forgotten; }));
    EXPECT_NE(cancellation.OnCancel([&] { ++kept; }), 0u);
    cancellation.Cancel();
    EXPECT_EQ(forgotten, 0);
    EXPECT_EQ(kept, 1);
    EXPECT_EQ(CodeOf([&] { future.Get(); }), DG_CANCELLED);
    EXPECT_EQ(CodeOf([&] { cancellation.ThrowIfCancelled(); }), DG_CANCELLED);
  }
  EXPECT_NE(worker.MetricsText().find("distgrad_calls_total"), std::string::npos);
  EXPECT_EQ(worker.local_rank(), 0u);
  EXPECT_EQ(worker.local_world_size(), 0u);
  {
    const dg::Context context(worker);
    const dg::Future future = worker.CallAsync("worker1", "scale", dg::Message("", {x}), &context);
    bool called = false;
    ASSERT_TRUE(future.Wait());
    const dg::Message reply = future.Get();
    future.Then([&] { called = true; });
    EXPECT_TRUE(called);
    dg::Completions completions;
    EXPECT_GE(completions.descriptor(), 0);
    EXPECT_TRUE(completions.Take().empty());
    for (uint64_t tag = 0; tag < 100; ++tag) completions.Watch(future, tag);
    const std::vector<uint64_t> tags = completions.Take();
    ASSERT_EQ(tags.size(), 100u);
    EXPECT_EQ(tags[99], 99u);
    EXPECT_TRUE(completions.Take().empty());
    context.Backward({reply.tensor(0)});
    size_t sends = 0;
    worker.Contexts([&](const dg_context_state& state) { sends += state.sends; });
    EXPECT_EQ(sends, 1u);
    EXPECT_THROW(worker.Contexts([](const dg_context_state&) { throw std::runtime_error("no"); }),
                 std::runtime_error);
    EXPECT_EQ(context.Gradient(x).data<float>()[0], 5);
    context.SetGradient(x, dg::Tensor::From<float>({7}, {1}));
    const double norm = optimizer.ClipGradients(context, 1e6);  // of 7, and 2 over there
    EXPECT_NEAR(norm, std::sqrt(53), 1e-4);
    EXPECT_EQ(CodeOf([&] { optimizer.ClipGradients(context, -1); }), DG_INVALID_ARGUMENT);
    optimizer.Step(context);
    EXPECT_LT(x.data<float>()[0], 2);
    EXPECT_EQ(worker.CallOp("worker1", "aten::neg", {x}, &context).tensor(0).element_count(), 1);
  }
  {
    const dg::Context context(worker);
    EXPECT_GE(worker.context_count(), 1u);
    const dg::Future future = worker.CallOpAsync("worker1", "aten::mul.Tensor", {x, x}, &context);
    const std::vector<dg::Tensor> squares = future.GetValues().tensors();
    ASSERT_EQ(squares.size(), 1u);
    context.BackwardAsync({squares[0]}).Get();
    const std::vector<std::pair<dg::Tensor, dg::Tensor>> gradients = context.Gradients();
    ASSERT_EQ(gradients.size(), 1u);
    EXPECT_EQ(gradients[0].first.data<float>(), x.data<float>());
    EXPECT_EQ(gradients[0].second.data<float>()[0], 2 * x.data<float>()[0]);
    EXPECT_EQ(CodeOf([&] { context.BackwardAsync({squares[0]}).Get(); }), DG_FAILED_PRECONDITION);
  }
  Replicas(worker, 1);
  Pipelines(worker);
  worker.Shutdown();
  back.join();
  worker.Leave();
  EXPECT_EQ(CodeOf([&] { worker.Leave(); }), DG_FAILED_PRECONDITION);
}

}  // namespace
