// Functions that make a handle, with each of their allocations failing in turn: then there is an
// error and no handle, and nothing is left behind, so that the same call can be made again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "capi/include/distgrad/distgrad.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

// More than the C interface allocates before something begins behind a handle. What that does
// without memory is not its business.
constexpr int kOfTheInterface = 100;

// Fewer than a step of a pipeline makes before its first call. When it ends for want of memory
// behind that, the call may still be on its way, and have the next step refused.
constexpr int kBeforeTheFirstCall = 25;

// The functions that a test here has called so.
std::set<std::string>& Tested() {
  static auto* const tested = new std::set<std::string>;
  return *tested;
}

dg_str ToStr(const std::string& text) { return {text.data(), text.size()}; }

std::ptrdiff_t Descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

void ExpectOk(dg_error* error) {
  const dg_str message = dg_error_message(error);
  EXPECT_EQ(dg_error_code(error), DG_OK) << std::string(message.data, message.size);
  dg_error_destroy(error);
}

// Ends a handle, of which it checks before that it is what the call should give.
template <typename Handle>
using End = std::function<void(Handle* made)>;

// Calls it with its first allocation failing, with its second, and so on, until none fails; or
// until `most` were tried. Before each of the calls it calls `prepare`.
template <typename Handle>
void FailEachAllocation(
    const char* function, const std::function<dg_error*(Handle** out)>& call,
    const End<Handle>& end, int most = INT_MAX, const std::function<void()>& prepare = [] {}) {
  Tested().insert(function);
  int nth = 0, errors = 0;
  for (bool failed = true; failed && nth < most && !testing::Test::HasFailure(); ++nth) {
    prepare();
    SCOPED_TRACE(absl::StrCat(function, ", allocation ", nth));
    Handle* out = nullptr;
    FailAllocation(nth);
    dg_error* const error = call(&out);
    failed = FailAllocation(-1);
    const dg_str message = dg_error_message(error);
    if (error == nullptr) {
      // None failed, or the library did without what it was for.
      ASSERT_NE(out, nullptr);
      end(out);
      if (most < INT_MAX) break;  // the handle is there, and what it stands for has begun
    } else {
      ++errors;
      EXPECT_TRUE(failed);
      EXPECT_EQ(dg_error_code(error), DG_RESOURCE_EXHAUSTED)
          << std::string(message.data, message.size);
      EXPECT_EQ(out, nullptr);
    }
    dg_error_destroy(error);
    prepare();
    Handle* again = nullptr;
    ExpectOk(call(&again));
    ASSERT_NE(again, nullptr);
    end(again);
  }
  EXPECT_GT(errors, 0) << function;
}

class NoMemoryTest : public testing::Test {
 protected:
  NoMemoryTest() {
    static std::atomic<int> number{0};
    folder_ = absl::StrCat(testing::TempDir(), "/no_memory.", getpid(), ".", ++number);
    std::filesystem::create_directory(folder_);
    const std::string rendezvous = absl::StrCat("file://", folder_, "/rendezvous");
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;
    options.name = name_;
    options.world_size = 1;
    options.rendezvous = ToStr(rendezvous);
    ExpectOk(dg_worker_create(&options, &worker_));
    const auto count = [](void* user_data, const dg_request* request,
                          dg_message** reply) -> dg_error* {
      ++*static_cast<std::atomic<int>*>(user_data);
      (void)request;
      return dg_message_create("counted", 7, nullptr, 0, reply);
    };
    ExpectOk(dg_worker_register(worker_, DG_STR("count"), count, &counted_, nullptr));
    const std::array<float, 2> values = {1, 2};
    const std::array<int64_t, 1> shape = {2};
    ExpectOk(dg_tensor_from_data(values.data(), DG_FLOAT32, shape.data(), 1, &parameter_));
    ExpectOk(dg_tensor_require_grad(parameter_));
    ExpectOk(dg_message_create("ask", 3, nullptr, 0, &request_));
  }
  ~NoMemoryTest() override {
    FailAllocation(-1);
    dg_message_destroy(request_);
    dg_tensor_destroy(parameter_);
    dg_worker_destroy(worker_);
    std::filesystem::remove_all(folder_);
  }

  // Returns the sum of the products of the elements of two tensors.
  static dg_tensor* SumOfProducts(const dg_tensor* a, const dg_tensor* b) {
    const std::array<dg_value, 2> factors = {dg_value_tensor(a), dg_value_tensor(b)};
    dg_tensor* products = nullptr;
    ExpectOk(dg_op_tensors(DG_STR("aten::mul.Tensor"), factors.data(), 2, &products, 1));
    const std::array<dg_value, 1> summands = {dg_value_tensor(products)};
    dg_tensor* sum = nullptr;
    ExpectOk(dg_op_tensors(DG_STR("aten::sum"), summands.data(), 1, &sum, 1));
    dg_tensor_destroy(products);
    return sum;
  }

  static void AwaitAndDestroy(dg_future* future) {
    bool done = false;
    ExpectOk(dg_future_wait(future, DG_FOREVER, &done));
    EXPECT_TRUE(done);
    dg_future_destroy(future);
  }

  const dg_str name_ = DG_STR("alone");
  std::string folder_;
  dg_worker* worker_ = nullptr;
  dg_tensor* parameter_ = nullptr;
  dg_message* request_ = nullptr;
  std::atomic<int> counted_{0};
};

TEST_F(NoMemoryTest, Optimizers) {
  const std::array<const dg_tensor*, 1> parameters = {parameter_};
  const End<dg_optimizer> end = [](dg_optimizer* made) {
    ExpectOk(dg_optimizer_remove(made));
    dg_optimizer_destroy(made);
  };
  // NULL makes local ones.
  for (dg_worker* const worker : {worker_, static_cast<dg_worker*>(nullptr)}) {
    FailEachAllocation<dg_optimizer>(
        "dg_optimizer_create_sgd",
        [&](dg_optimizer** out) {
          return dg_optimizer_create_sgd(worker, DG_STR("a"), parameters.data(), 1, nullptr, out);
        },
        end);
    FailEachAllocation<dg_optimizer>(
        "dg_optimizer_create_adam",
        [&](dg_optimizer** out) {
          return dg_optimizer_create_adam(worker, DG_STR("a"), parameters.data(), 1, nullptr, out);
        },
        end);
    FailEachAllocation<dg_optimizer>(
        "dg_optimizer_create_adamw",
        [&](dg_optimizer** out) {
          return dg_optimizer_create_adamw(worker, DG_STR("a"), parameters.data(), 1, nullptr, out);
        },
        end);
  }
}

TEST_F(NoMemoryTest, Futures) {
  // Before there is a handle nothing has been called.
  int calls = 0;
  FailEachAllocation<dg_future>(
      "dg_worker_call_async",
      [&](dg_future** out) {
        EXPECT_EQ(counted_, calls);
        return dg_worker_call_async(worker_, name_, DG_STR("count"), request_, nullptr, out);
      },
      [&](dg_future* made) {
        AwaitAndDestroy(made);
        calls = counted_;
      },
      /*most=*/kOfTheInterface);
  const std::array<dg_value, 1> arguments = {dg_value_tensor(parameter_)};
  FailEachAllocation<dg_future>(
      "dg_worker_call_op_async",
      [&](dg_future** out) {
        return dg_worker_call_op_async(worker_, name_, DG_STR("aten::neg"), arguments.data(), 1,
                                       nullptr, out);
      },
      [](dg_future* made) { AwaitAndDestroy(made); }, /*most=*/kOfTheInterface);
  dg_future* call = nullptr;
  bool is_done = false;
  ExpectOk(dg_worker_call_async(worker_, name_, DG_STR("count"), request_, nullptr, &call));
  ExpectOk(dg_future_wait(call, DG_FOREVER, &is_done));
  FailEachAllocation<dg_message>(
      "dg_future_result", [&](dg_message** out) { return dg_future_result(call, out); },
      [](dg_message* reply) {
        EXPECT_EQ(dg_message_payload(reply).size, 7u);
        dg_message_destroy(reply);
      });
  dg_future_destroy(call);
  ExpectOk(dg_worker_call_op_async(worker_, name_, DG_STR("aten::neg"), arguments.data(), 1,
                                   nullptr, &call));
  ExpectOk(dg_future_wait(call, DG_FOREVER, &is_done));
  FailEachAllocation<dg_values>(
      "dg_future_values", [&](dg_values** out) { return dg_future_values(call, out); },
      [](dg_values* values) {
        EXPECT_EQ(dg_values_count(values), 1u);
        dg_values_destroy(values);
      });
  dg_future_destroy(call);

  dg_context* context = nullptr;
  ExpectOk(dg_context_create(worker_, &context));
  dg_tensor* const sum = SumOfProducts(parameter_, parameter_);
  const std::array<const dg_tensor*, 1> roots = {sum};
  dg_backward_options options = DG_BACKWARD_OPTIONS_INIT;
  options.flags = DG_BACKWARD_RETAIN_GRAPH;
  int backwards = 0;
  FailEachAllocation<dg_future>(
      "dg_context_backward_async",
      [&](dg_future** out) {
        return dg_context_backward_async(context, roots.data(), 1, &options, out);
      },
      [&](dg_future* made) {
        bool done = false;
        ExpectOk(dg_future_wait(made, DG_FOREVER, &done));
        ++backwards;
        dg_future_destroy(made);
        // No other one has begun.
        dg_tensor* gradient = nullptr;
        ExpectOk(dg_context_gradient(context, parameter_, &gradient));
        void* data = nullptr;
        ExpectOk(dg_tensor_data(gradient, &data));
        EXPECT_EQ(static_cast<const float*>(data)[0], 2.0f * static_cast<float>(backwards));
        dg_tensor_destroy(gradient);
      },
      /*most=*/3);
  FailEachAllocation<dg_tensor>(
      "dg_context_gradient",
      [&](dg_tensor** out) { return dg_context_gradient(context, parameter_, out); },
      [](dg_tensor* gradient) { dg_tensor_destroy(gradient); });
  dg_tensor_destroy(sum);
  dg_context_destroy(context);
}

// What was visited before an error would be visited again by the next call.
TEST_F(NoMemoryTest, AnErrorVisitsNothing) {
  const std::array<float, 2> values = {3, 4};
  const std::array<int64_t, 1> shape = {2};
  dg_tensor* other = nullptr;
  ExpectOk(dg_tensor_from_data(values.data(), DG_FLOAT32, shape.data(), 1, &other));
  ExpectOk(dg_tensor_require_grad(other));
  dg_tensor* const sum = SumOfProducts(parameter_, other);
  const std::array<const dg_tensor*, 1> roots = {sum};
  dg_context* context = nullptr;
  ExpectOk(dg_context_create(worker_, &context));
  ExpectOk(dg_context_backward(context, roots.data(), 1, nullptr));
  const std::array<const dg_tensor*, 2> parameters = {parameter_, other};
  dg_optimizer* optimizer = nullptr;
  ExpectOk(
      dg_optimizer_create_adam(nullptr, DG_STR(""), parameters.data(), 2, nullptr, &optimizer));
  ExpectOk(dg_optimizer_step(optimizer, context));
  const std::string path = folder_ + "/two.safetensors";
  const std::array<dg_str, 2> names = {DG_STR("a"), DG_STR("b")};
  ExpectOk(dg_safetensors_save(ToStr(path), names.data(), parameters.data(), 2, nullptr, 0));

  const auto count = [](void* visits, dg_str, const dg_tensor*) { ++*static_cast<int*>(visits); };
  const std::vector<std::function<dg_error*(int* visits)>> all = {
      [&](int* visits) {
        return dg_context_gradients(
            context,
            [](void* counted, const dg_tensor*, const dg_tensor*) {
              ++*static_cast<int*>(counted);
            },
            visits);
      },
      [&](int* visits) { return dg_optimizer_state(optimizer, count, visits); },
      [&](int* visits) { return dg_safetensors_load(ToStr(path), count, visits); }};
  for (size_t i = 0; i < all.size(); ++i) {
    bool failed = true;
    for (int nth = 0; failed && !HasFailure(); ++nth) {
      SCOPED_TRACE(absl::StrCat("function ", i, ", allocation ", nth));
      int visits = 0;
      FailAllocation(nth);
      dg_error* const error = all[i](&visits);
      failed = FailAllocation(-1);
      EXPECT_TRUE(error == nullptr ? visits >= 2 : visits == 0) << visits;
      dg_error_destroy(error);
    }
  }
  dg_optimizer_destroy(optimizer);
  dg_context_destroy(context);
  dg_tensor_destroy(sum);
  dg_tensor_destroy(other);
}

TEST_F(NoMemoryTest, Operators) {
  const std::array<dg_value, 1> arguments = {dg_value_tensor(parameter_)};
  const End<dg_values> end = [](dg_values* made) {
    EXPECT_EQ(dg_values_count(made), 1u);
    dg_values_destroy(made);
  };
  FailEachAllocation<dg_values>(
      "dg_op_call",
      [&](dg_values** out) { return dg_op_call(DG_STR("aten::neg"), arguments.data(), 1, out); },
      end);
  FailEachAllocation<dg_tensor>(
      "dg_op_tensors",
      [&](dg_tensor** out) {
        return dg_op_tensors(DG_STR("aten::neg"), arguments.data(), 1, out, 1);
      },
      [](dg_tensor* made) { dg_tensor_destroy(made); });
}

// What refers to a tensor's memory keeps it from being given back.
TEST_F(NoMemoryTest, ViewsOfATensor) {
  std::array<float, 2> memory = {1, 2};
  const std::array<int64_t, 1> shape = {2};
  bool given_back = false;
  dg_tensor* tensor = nullptr;
  ExpectOk(dg_tensor_from_memory(
      memory.data(), DG_FLOAT32, shape.data(), nullptr, 1, &given_back,
      [](void* user_data) { *static_cast<bool*>(user_data) = true; }, &tensor));
  const std::array<dg_value, 1> arguments = {dg_value_tensor(tensor)};
  FailEachAllocation<dg_values>(
      "dg_op_call",
      [&](dg_values** out) { return dg_op_call(DG_STR("aten::alias"), arguments.data(), 1, out); },
      [](dg_values* made) { dg_values_destroy(made); });
  const std::array<dg_str, 2> devices = {DG_STR("cpu"), DG_STR("cpu")};
  dg_tensor* parts[2] = {};
  FailEachAllocation<dg_tensor>(
      "dg_scatter",
      [&](dg_tensor** out) {
        size_t count = 0;
        dg_error* const error =
            dg_scatter(tensor, devices.data(), devices.size(), 0, nullptr, parts, &count);
        if (error == nullptr) *out = parts[0];
        return error;
      },
      [&](dg_tensor*) {
        for (dg_tensor* const part : parts) dg_tensor_destroy(part);
      });
  dg_tensor_destroy(tensor);
  EXPECT_TRUE(given_back);
}

TEST_F(NoMemoryTest, SmallObjects) {
  FailEachAllocation<dg_context>(
      "dg_context_create", [&](dg_context** out) { return dg_context_create(worker_, out); },
      [](dg_context* made) { dg_context_destroy(made); });
  const auto before = Descriptors();
  FailEachAllocation<dg_completions>(
      "dg_completions_create", [](dg_completions** out) { return dg_completions_create(out); },
      [](dg_completions* made) { dg_completions_destroy(made); });
  EXPECT_EQ(Descriptors(), before);
  FailEachAllocation<dg_cancellation>(
      "dg_cancellation_create", [](dg_cancellation** out) { return dg_cancellation_create(out); },
      [](dg_cancellation* made) { dg_cancellation_destroy(made); });
  const std::array<const dg_tensor*, 1> tensors = {parameter_};
  dg_message* of_tensor = nullptr;
  ExpectOk(dg_message_create(nullptr, 0, tensors.data(), 1, &of_tensor));
  FailEachAllocation<dg_message>(
      "dg_message_create",
      [&](dg_message** out) { return dg_message_create("payload", 7, tensors.data(), 1, out); },
      [](dg_message* made) { dg_message_destroy(made); });
  const End<dg_tensor> end = [](dg_tensor* made) { dg_tensor_destroy(made); };
  FailEachAllocation<dg_tensor>(
      "dg_message_tensor", [&](dg_tensor** out) { return dg_message_tensor(of_tensor, 0, out); },
      end);
  FailEachAllocation<dg_tensor>(
      "dg_tensor_clone", [&](dg_tensor** out) { return dg_tensor_clone(parameter_, out); }, end);
  FailEachAllocation<dg_tensor>(
      "dg_tensor_detach", [&](dg_tensor** out) { return dg_tensor_detach(parameter_, out); }, end);
  const std::array<float, 2> values = {1, 2};
  const std::array<int64_t, 1> shape = {2};
  FailEachAllocation<dg_tensor>(
      "dg_tensor_from_data",
      [&](dg_tensor** out) {
        return dg_tensor_from_data(values.data(), DG_FLOAT32, shape.data(), 1, out);
      },
      end);
  dg_message_destroy(of_tensor);
  FailEachAllocation<dg_message>(
      "dg_worker_metrics_text",
      [&](dg_message** out) { return dg_worker_metrics_text(worker_, out); },
      [](dg_message* made) {
        EXPECT_GT(dg_message_payload(made).size, 0u);
        dg_message_destroy(made);
      });
}

TEST_F(NoMemoryTest, Checkpoints) {
  const dg_str weight = DG_STR("weight");
  const std::array<const dg_tensor*, 1> tensors = {parameter_};
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  contents.tensor_names = &weight;
  contents.tensors = tensors.data();
  contents.tensor_count = 1;
  FailEachAllocation<dg_checkpoint_part>(
      "dg_checkpoint_part_create",
      [&](dg_checkpoint_part** out) {
        return dg_checkpoint_part_create(worker_, DG_STR("p"), &contents, nullptr, nullptr, out);
      },
      [](dg_checkpoint_part* made) {
        ExpectOk(dg_checkpoint_part_remove(made));
        dg_checkpoint_part_destroy(made);
      });
  const std::string folder = folder_ + "/checkpoints";
  const auto before = Descriptors();
  FailEachAllocation<dg_checkpoint_manager>(
      "dg_checkpoint_manager_create",
      [&](dg_checkpoint_manager** out) {
        return dg_checkpoint_manager_create(worker_, ToStr(folder), nullptr, out);
      },
      [](dg_checkpoint_manager* made) { dg_checkpoint_manager_destroy(made); });
  EXPECT_EQ(Descriptors(), before);

  dg_checkpoint_part* part = nullptr;
  dg_checkpoint_manager* manager = nullptr;
  ExpectOk(dg_checkpoint_part_create(worker_, DG_STR(""), &contents, nullptr, nullptr, &part));
  ExpectOk(dg_checkpoint_manager_create(worker_, ToStr(folder), nullptr, &manager));
  int64_t step = 0;
  FailEachAllocation<dg_future>(
      "dg_checkpoint_manager_save_async",
      [&](dg_future** out) {
        return dg_checkpoint_manager_save_async(manager, ++step, DG_FOREVER, out);
      },
      [](dg_future* made) { AwaitAndDestroy(made); }, /*most=*/3);
  dg_checkpoint_manager_destroy(manager);
  dg_checkpoint_part_destroy(part);
}

TEST_F(NoMemoryTest, Safetensors) {
  const std::string path = folder_ + "/one.safetensors";
  const dg_str weight = DG_STR("weight");
  const std::array<const dg_tensor*, 1> tensors = {parameter_};
  ExpectOk(dg_safetensors_save(ToStr(path), &weight, tensors.data(), 1, nullptr, 0));
  const auto before = Descriptors();
  FailEachAllocation<dg_safetensors_file>(
      "dg_safetensors_file_open",
      [&](dg_safetensors_file** out) { return dg_safetensors_file_open(ToStr(path), out); },
      [](dg_safetensors_file* made) { dg_safetensors_file_destroy(made); });
  EXPECT_EQ(Descriptors(), before);
  dg_safetensors_file* file = nullptr;
  ExpectOk(dg_safetensors_file_open(ToStr(path), &file));
  FailEachAllocation<dg_tensor>(
      "dg_safetensors_file_read",
      [&](dg_tensor** out) { return dg_safetensors_file_read(file, weight, out); },
      [](dg_tensor* made) { dg_tensor_destroy(made); });
  dg_safetensors_file_destroy(file);
}

TEST_F(NoMemoryTest, Schedules) {
  using Create = dg_error* (*)(uint64_t, uint64_t, dg_schedule**);
  const End<dg_schedule> end = [](dg_schedule* made) {
    EXPECT_NE(dg_schedule_get(made), nullptr);
    dg_schedule_destroy(made);
  };
  const std::vector<std::pair<const char*, Create>> all = {
      {"dg_schedule_create_gpipe", dg_schedule_create_gpipe},
      {"dg_schedule_create_one_forward_one_backward", dg_schedule_create_one_forward_one_backward},
      {"dg_schedule_create_zero_bubble_h1", dg_schedule_create_zero_bubble_h1},
      {"dg_schedule_create_zero_bubble_h2", dg_schedule_create_zero_bubble_h2}};
  for (const auto& [name, create] : all) {
    FailEachAllocation<dg_schedule>(
        name, [create = create](dg_schedule** out) { return create(2, 2, out); }, end);
  }
  FailEachAllocation<dg_schedule>(
      "dg_schedule_create_interleaved_one_forward_one_backward",
      [](dg_schedule** out) {
        return dg_schedule_create_interleaved_one_forward_one_backward(1, 2, 2, out);
      },
      end);
  FailEachAllocation<dg_schedule>(
      "dg_schedule_create_zero_bubble",
      [](dg_schedule** out) { return dg_schedule_create_zero_bubble(2, 2, 3, out); }, end);
  dg_schedule* one = nullptr;
  ExpectOk(dg_schedule_create_gpipe(1, 1, &one));
  FailEachAllocation<dg_schedule>(
      "dg_schedule_create",
      [&](dg_schedule** out) { return dg_schedule_create(dg_schedule_get(one), 0, out); }, end);
  dg_schedule_destroy(one);
}

dg_error* Forward(void* user_data, const dg_micro_batch* batch, dg_message** outputs) {
  const std::array<dg_value, 2> arguments = {
      dg_value_tensor(batch->inputs[0]), dg_value_tensor(static_cast<const dg_tensor*>(user_data))};
  dg_tensor* out = nullptr;
  dg_error* const error = dg_op_tensors(DG_STR("aten::mul.Tensor"), arguments.data(), 2, &out, 1);
  if (error != nullptr) return error;
  const std::array<const dg_tensor*, 1> given = {out};
  dg_error* const made = dg_message_create(nullptr, 0, given.data(), 1, outputs);
  dg_tensor_destroy(out);
  return made;
}

TEST_F(NoMemoryTest, Pipelines) {
  // The user data of each stage ends with every call, whichever allocation of it fails.
  std::array<int, 3> ended = {};
  int calls = 0;
  std::array<dg_pipeline_stage, 3> counted;
  std::array<const dg_pipeline_stage*, 3> pointers;
  for (size_t i = 0; i < counted.size(); ++i) {
    counted[i] = DG_PIPELINE_STAGE_INIT;
    counted[i].number = i;
    counted[i].forward = Forward;
    counted[i].user_data = &ended[i];
    counted[i].destroy = [](void* user_data) { ++*static_cast<int*>(user_data); };
    pointers[i] = &counted[i];
  }
  FailEachAllocation<dg_pipeline_stages>(
      "dg_pipeline_stages_create",
      [&](dg_pipeline_stages** out) {
        ++calls;
        return dg_pipeline_stages_create(worker_, DG_STR("three"), pointers.data(), pointers.size(),
                                         nullptr, out);
      },
      [](dg_pipeline_stages* three) { dg_pipeline_stages_destroy(three); },
      /*most=*/INT_MAX,
      [&] {
        EXPECT_EQ(ended, (std::array<int, 3>{calls, calls, calls}));
      });

  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  stage.forward = Forward;
  stage.user_data = parameter_;
  const std::array<const dg_pipeline_stage*, 1> stages = {&stage};
  const auto create_stages = [&](dg_pipeline_stages** out) {
    return dg_pipeline_stages_create(worker_, DG_STR("model"), stages.data(), 1, nullptr, out);
  };
  FailEachAllocation<dg_pipeline_stages>(
      "dg_pipeline_stages_create", create_stages,
      [](dg_pipeline_stages* made) { dg_pipeline_stages_destroy(made); });
  dg_pipeline_stages* made = nullptr;
  ExpectOk(create_stages(&made));
  dg_schedule* schedule = nullptr;
  ExpectOk(dg_schedule_create_gpipe(1, 1, &schedule));
  const auto create = [&](dg_pipeline** out) {
    return dg_pipeline_create(worker_, DG_STR("model"), schedule, &name_, 1, nullptr, out);
  };
  FailEachAllocation<dg_pipeline>("dg_pipeline_create", create,
                                  [](dg_pipeline* pipeline) { dg_pipeline_destroy(pipeline); });
  dg_pipeline* pipeline = nullptr;
  ExpectOk(create(&pipeline));
  dg_tensor* batch = nullptr;
  ExpectOk(dg_tensor_detach(parameter_, &batch));
  const std::array<const dg_tensor*, 1> inputs = {batch};
  const auto evaluate = [&](dg_pipeline_result** out) {
    return dg_pipeline_evaluate(pipeline, inputs.data(), 1, nullptr, 0, nullptr, out);
  };
  FailEachAllocation<dg_pipeline_result>(
      "dg_pipeline_evaluate", evaluate,
      [](dg_pipeline_result* result) { dg_pipeline_result_destroy(result); },
      /*most=*/kBeforeTheFirstCall);
  dg_context* context = nullptr;
  ExpectOk(dg_context_create(worker_, &context));
  FailEachAllocation<dg_pipeline_step>(
      "dg_pipeline_start",
      [&](dg_pipeline_step** out) {
        return dg_pipeline_start(pipeline, context, inputs.data(), 1, nullptr, 0, nullptr, out);
      },
      [](dg_pipeline_step* step) { dg_pipeline_step_destroy(step); },
      /*most=*/kBeforeTheFirstCall);
  dg_context_destroy(context);
  dg_pipeline_result* result = nullptr;
  ExpectOk(evaluate(&result));
  FailEachAllocation<dg_message>(
      "dg_pipeline_result_outputs",
      [&](dg_message** out) { return dg_pipeline_result_outputs(result, 0, out); },
      [](dg_message* outputs) {
        EXPECT_EQ(dg_message_tensor_count(outputs), 1u);
        dg_message_destroy(outputs);
      });
  FailEachAllocation<dg_message>(
      "dg_pipeline_result_losses",
      [&](dg_message** out) { return dg_pipeline_result_losses(result, out); },
      [](dg_message* losses) { dg_message_destroy(losses); });
  dg_pipeline_result_destroy(result);
  dg_tensor_destroy(batch);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
  dg_pipeline_stages_destroy(made);
}

// Of stages that have had a step: the name is free, whichever allocation fails.
TEST_F(NoMemoryTest, TheEndOfStages) {
  dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
  stage.forward = Forward;
  stage.user_data = parameter_;
  const std::array<const dg_pipeline_stage*, 1> stages = {&stage};
  dg_schedule* schedule = nullptr;
  ExpectOk(dg_schedule_create_gpipe(1, 1, &schedule));
  dg_pipeline* pipeline = nullptr;
  ExpectOk(dg_pipeline_create(worker_, DG_STR("model"), schedule, &name_, 1, nullptr, &pipeline));
  dg_tensor* batch = nullptr;
  ExpectOk(dg_tensor_detach(parameter_, &batch));
  const std::array<const dg_tensor*, 1> inputs = {batch};
  int nth = 0;
  for (bool failed = true; failed && !HasFailure(); ++nth) {
    SCOPED_TRACE(nth);
    dg_pipeline_stages* made = nullptr;
    ExpectOk(dg_pipeline_stages_create(worker_, DG_STR("model"), stages.data(), 1, nullptr, &made));
    dg_pipeline_result* result = nullptr;
    ExpectOk(dg_pipeline_evaluate(pipeline, inputs.data(), 1, nullptr, 0, nullptr, &result));
    dg_pipeline_result_destroy(result);
    FailAllocation(nth);
    dg_pipeline_stages_destroy(made);
    failed = FailAllocation(-1);
  }
  EXPECT_GT(nth, 1);
  dg_tensor_destroy(batch);
  dg_pipeline_destroy(pipeline);
  dg_schedule_destroy(schedule);
}

// Each future that is watched gives its tag.
TEST_F(NoMemoryTest, Completions) {
  dg_future* call = nullptr;
  ExpectOk(dg_worker_call_async(worker_, name_, DG_STR("count"), request_, nullptr, &call));
  bool is_done = false;
  ExpectOk(dg_future_wait(call, DG_FOREVER, &is_done));
  ASSERT_TRUE(is_done);
  dg_completions* completions = nullptr;
  ExpectOk(dg_completions_create(&completions));
  std::vector<uint64_t> watched;
  constexpr uint64_t kEach = 200;  // more than a queue has memory for at a time
  for (uint64_t tag = 0; tag < 5 * kEach; ++tag) {
    FailAllocation(static_cast<int>(tag / kEach));
    dg_error* const error = dg_completions_watch(completions, call, tag);
    FailAllocation(-1);
    if (error == nullptr) watched.push_back(tag);
    dg_error_destroy(error);
  }
  EXPECT_GE(watched.size(), kEach);
  std::vector<uint64_t> tags(watched.size() + 1);
  size_t count = 0;
  ExpectOk(dg_completions_take(completions, tags.data(), tags.size(), &count));
  tags.resize(count);
  EXPECT_EQ(tags, watched);
  dg_completions_destroy(completions);
  dg_future_destroy(call);
}

// Where there is an error the name is free. What keeps them grows now and then.
TEST_F(NoMemoryTest, Functions) {
  const auto handle = [](void*, const dg_request*, dg_message**) -> dg_error* { return nullptr; };
  const auto handle_later = [](void*, const dg_request*, dg_responder* responder) {
    dg_error_destroy(dg_responder_answer(responder, nullptr, nullptr));
  };
  int errors = 0;
  for (int number = 0; number < 20; ++number) {
    for (const bool later : {false, true}) {
      const std::string name = absl::StrCat("a function with a name of its own, ", number, later);
      bool made = false;
      for (int nth = 0; !made && !HasFailure(); ++nth) {
        SCOPED_TRACE(absl::StrCat(name, ", allocation ", nth));
        FailAllocation(nth);
        dg_error* const error =
            later
                ? dg_worker_register_responder(worker_, ToStr(name), handle_later, nullptr, nullptr)
                : dg_worker_register(worker_, ToStr(name), handle, nullptr, nullptr);
        FailAllocation(-1);
        made = error == nullptr;
        if (!made) ++errors;
        EXPECT_TRUE(made || dg_error_code(error) == DG_RESOURCE_EXHAUSTED) << dg_error_code(error);
        dg_error_destroy(error);
      }
    }
  }
  EXPECT_GT(errors, 0);
}

TEST_F(NoMemoryTest, Groups) {
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  dg_process_group* group = nullptr;
  const std::array<const dg_tensor*, 1> parameters = {parameter_};
  FailEachAllocation<dg_gradient_averager>(
      "dg_gradient_averager_create",
      [&](dg_gradient_averager** out) {
        return dg_gradient_averager_create(group, parameters.data(), 1, nullptr, out);
      },
      [](dg_gradient_averager* made) { dg_gradient_averager_destroy(made); },
      /*most=*/4,
      // What fails in the middle fails the group.
      [&] {
        dg_process_group_destroy(group);
        group = nullptr;
        ExpectOk(dg_process_group_create(worker_, &options, &group));
      });
  dg_process_group_destroy(group);
}

TEST_F(NoMemoryTest, Traces) {
  FailEachAllocation<dg_message>(
      "dg_worker_stop_trace",
      [&](dg_message** out) -> dg_error* {
        dg_error* const started = dg_worker_start_trace(worker_, nullptr);
        // One that runs already, as the stop before it has failed before it did anything.
        if (dg_error_code(started) == DG_FAILED_PRECONDITION) {
          dg_error_destroy(started);
        } else if (started != nullptr) {
          return started;
        }
        return dg_worker_stop_trace(worker_, out);
      },
      [](dg_message* made) {
        EXPECT_GT(dg_message_payload(made).size, 0u);
        dg_message_destroy(made);
      });
}

// One that there was no memory to close is closed by the next call. What needs none to fail, the
// rest of its end, waits for it. That holds until its transport ends: TensorPipe needs memory.
TEST_F(NoMemoryTest, TheEndOfAWorker) {
  constexpr int kAllocations = 5;
  int errors = 0;
  for (int nth = 0; nth < kAllocations; ++nth) {
    SCOPED_TRACE(nth);
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;
    const std::string own = absl::StrCat("file://", folder_, "/end", nth);
    options.world_size = 1;
    options.rendezvous = ToStr(own);
    dg_worker* worker = nullptr;
    ExpectOk(dg_worker_create(&options, &worker));
    dg_context* context = nullptr;  // whose passes are to be ended
    ExpectOk(dg_context_create(worker, &context));
    FailAllocation(nth);
    dg_error* const error = dg_worker_close(worker, DG_FOREVER);
    EXPECT_TRUE(FailAllocation(-1));
    if (error != nullptr) {
      ++errors;
      EXPECT_EQ(dg_error_code(error), DG_RESOURCE_EXHAUSTED);
    }
    dg_error_destroy(error);
    ExpectOk(dg_worker_close(worker, /*timeout_ms=*/30000));
    dg_context_destroy(context);
    dg_worker_destroy(worker);
  }
  EXPECT_GT(errors, 0);
}

// What is not in the list has to have a test above.
TEST(NoMemoryListTest, EachFunctionThatMakesAHandleIsTested) {
  const std::set<std::string> others = {
      // They take memory, or tensors, of the program's: given once, they cannot be given again.
      "dg_tensor_from_memory", "dg_tensor_from_dlpack", "dg_tensor_from_torch",
      // They give a tensor of what is there.
      "dg_pipeline_result_loss",
      // They wait, and meanwhile this thread may do the transport's work: their handles are made
      // before the call (worker.cc).
      "dg_worker_call", "dg_worker_call_each", "dg_worker_call_op", "dg_checkpoint_load",
      "dg_checkpoint_manager_load",
      // It joins a job; and the constructor of libtorch's ProcessGroupGloo ends the program, which
      // begins threads before it has memory for all.
      "dg_worker_create", "dg_process_group_create",
      // After its step was taken nothing is allocated (pipeline.cc).
      "dg_pipeline_train", "dg_pipeline_step_wait",
      // They work on this process alone, and make their handles when all is done.
      "dg_data_parallel_create", "dg_data_parallel_forward", "dg_gather", "dg_broadcast",
      "dg_reduce_add"};
  std::ifstream file("capi/include/distgrad/distgrad.h");
  const std::string header{std::istreambuf_iterator<char>(file), {}};
  const std::regex maker(
      R"((dg_\w+)\(([^;()]|\([^;]*?\))*?\bdg_\w+\*\* ?(out|outs|outputs|reply|replies)\b)");
  std::set<std::string> makers;
  for (auto at = std::sregex_iterator(header.begin(), header.end(), maker);
       at != std::sregex_iterator(); ++at) {
    makers.insert((*at)[1]);
  }
  EXPECT_GT(makers.size(), 50u);
  for (const std::string& name : makers) {
    EXPECT_TRUE(Tested().count(name) + others.count(name) == 1) << name;
  }
}

}  // namespace
}  // namespace distgrad
