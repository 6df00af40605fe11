// A member of the job, who has the key, calls operators of another worker with what might end its
// process: each call gets an error, the worker's memory keeps within its limits, and it goes on
// serving.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/base/wire.h"
#include "core/tensor/values.h"
#include "core/worker/worker.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

using ::absl::StatusCode;
using Values = std::vector<c10::IValue>;
using Ints = std::vector<int64_t>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMeasures = false;  // a sanitizer's own memory is part of what is measured
#else
constexpr bool kMeasures = true;
#endif

constexpr uint64_t kMessageBytes = 4 << 20;
constexpr uint32_t kTensors = 1024;
// By what the worker may grow meanwhile: what a node of a pass and a sum of gradients may allocate
// together, which is more than an operator may.
constexpr int64_t kMost = 16 * kMessageBytes;

WorkerOptions Options(const std::string& folder, int rank) {
  WorkerOptions options;
  options.name = rank == 0 ? "attacker" : "served";
  options.rendezvous = absl::StrCat("file://", folder, "/rendezvous");
  options.rank = rank;
  options.world_size = 2;
  options.key_file = absl::StrCat(folder, "/key");
  options.tls.encrypt_local = true;
  options.thread_count = 2;
  return options;
}

// ---------------------------------------------------------------- the worker that serves

// What the system says of this process's memory: `name` is as in /proc/self/status.
int64_t StatusBytes(absl::string_view name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    long long kilobytes = 0;
    if (absl::StartsWith(line, absl::StrCat(name, ":")) &&
        std::sscanf(line.c_str() + name.size(), ": %lld kB", &kilobytes) == 1) {
      return kilobytes * 1024;
    }
  }
  return -1;
}

// The most that this process has had since the last call, and what it has now; each without what it
// has read of libraries.
std::string SayMemory() {
  const int64_t peak = StatusBytes("VmHWM") - StatusBytes("RssFile");
  malloc_trim(0);
  const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  const bool forgotten = fd >= 0 && write(fd, "5", 1) == 1;
  if (fd >= 0) close(fd);
  if (!forgotten) return "the peak cannot be forgotten";
  return absl::StrCat(peak, " ", StatusBytes("VmHWM") - StatusBytes("RssFile"));
}

int RunServed(const std::string& folder, ServeOperators operators) {
  // Where a limit is missing the machine goes on all the same.
  const rlimit room = {rlim_t{8} << 30, RLIM_INFINITY};
  if (kMeasures) setrlimit(RLIMIT_AS, &room);
  WorkerOptions options = Options(folder, 1);
  options.limits.message_bytes = kMessageBytes;
  options.limits.tensors_per_message = kTensors;
  options.serve_operators = operators;
  auto worker = Worker::Create(std::move(options));
  absl::Status status = worker.status();
  if (status.ok()) {
    status = (*worker)->Register("memory", [](Request&) -> absl::StatusOr<Message> {
      return Message{SayMemory(), {}};
    });
  }
  std::printf("%s\n", status.ToString().c_str());
  std::fflush(stdout);
  if (status.ok()) status = (*worker)->Serve();
  std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

// ---------------------------------------------------------------- the attacker

struct Attack {
  std::string name;
  Values arguments;
  StatusCode code;
};

at::Tensor View(const Ints& sizes) { return at::ones({1}).expand(sizes); }
at::Tensor Sparse(int64_t rows, int64_t columns) {
  return at::sparse_coo_tensor(at::zeros({2, 1}, at::kLong), at::ones({1}), {rows, columns});
}

std::vector<Attack> Attacks() {
  const c10::IValue none;
  const at::Tensor x = at::ones({1});
  const Values attention = {
      at::ones({0, 4, 2}), at::ones({0, 4, 2}), at::ones({0, 4, 2}), none, 0.0, false, none, true};
  const auto kExhausted = StatusCode::kResourceExhausted;
  const auto kInvalid = StatusCode::kInvalidArgument;
  const auto kDenied = StatusCode::kPermissionDenied;
  constexpr int64_t kHuge = int64_t{1} << 40, kWide = int64_t{1} << 25;
  return {
      // Elements.
      {"aten::new_ones", {x, Ints{kHuge}}, kExhausted},
      {"aten::new_ones", {x, Ints{int64_t{1} << 28}}, kExhausted},
      {"aten::repeat", {x, Ints{int64_t{1} << 28}}, kExhausted},
      {"aten::select.int", {View({kHuge}), 0, 0}, kExhausted},
      {"aten::mm", {at::ones({100000, 1}), at::ones({1, 100000})}, kExhausted},
      // Tensors without elements.
      {"aten::unbind.int", {at::zeros({int64_t{1} << 30, 0})}, kExhausted},
      {"aten::tensor_split.sections", {at::zeros({1, 0}), int64_t{1} << 30, 1}, kExhausted},
      // Lists.
      {"aten::meshgrid", {std::vector<at::Tensor>(1000, x)}, kExhausted},
      {"aten::topk", {at::ones({500000}), 1}, kExhausted},
      {"aten::roll", {x, Ints(100000, 0), Ints(100000, 0)}, kInvalid},
      // Sizes of what has no elements there: lists of as many columns, which may be any number.
      {"aten::mm", {Sparse(1, 1), Sparse(1, kWide)}, kExhausted},
      {"aten::matmul", {Sparse(1, 1), Sparse(1, kWide)}, kExhausted},
      // What would end the process, by its own name and by one that the dispatcher takes for it.
      {"aten::scaled_dot_product_attention", attention, kInvalid},
      {"aten::scaled_dot_product_attention.", attention, StatusCode::kNotFound},
      // What would write beside a tensor.
      {"aten::repeat_interleave.self_Tensor",
       {at::ones({3}), at::full({3}, -1, at::kLong)},
       kDenied},
      // What nobody has read.
      {"aten::combinations", {x, kHuge}, kDenied},
      {"aten::fft_fft", {x, 524287}, kDenied},
      {"aten::neg.out", {at::ones({3}), View({3})}, kDenied},
      {"aten::empty.memory_format", {Ints{1 << 10}}, kDenied},
      // What does more than compute.
      {"aten::from_file", {"/etc/passwd", none, 1}, kDenied},
      {"aten::_sparse_coo_tensor_unsafe", {x, x, Ints{kHuge}}, kDenied},
      {"aten::set_.source_Tensor", {x, x}, kDenied},
      {"profiler::_record_function_enter", {x}, kDenied},
      {"prim::Print", {x}, StatusCode::kNotFound},
  };
}

// Of a worker that serves all operators, whose limits are the same.
std::vector<Attack> AttacksOnAll() {
  const c10::IValue none;
  const at::Tensor x = at::ones({1});
  const auto kExhausted = StatusCode::kResourceExhausted;
  const auto kInvalid = StatusCode::kInvalidArgument;
  constexpr int64_t kHuge = int64_t{1} << 40, kWide = int64_t{1} << 25;
  return {
      // Elements.
      {"aten::as_strided", {at::ones({3}), Ints{2, 2, kHuge}, Ints{1, 1, 0}}, kExhausted},
      // Tensors without elements.
      {"aten::combinations", {x, kHuge}, kExhausted},
      // Lists.
      {"aten::unique_dim", {at::zeros({int64_t{1} << 30, 0}), 0}, kExhausted},
      // Scratch.
      {"aten::fft_fft", {x, 524287}, kExhausted},
      {"aten::stft",
       {at::ones({2 * 131071}), 131071, none, none, none, false, none, true},
       kExhausted},
      // Sizes of what has no elements there.
      {"aten::chain_matmul", {std::vector<at::Tensor>{Sparse(1, 1), Sparse(1, kWide)}}, kExhausted},
      {"aten::to_sparse_bsr", {Sparse(1, kWide), Ints{1, 1}}, kExhausted},
      // What would read or write beside a tensor.
      {"aten::median.dim", {View({1, 1000, 1}), 1}, kInvalid},
      {"aten::neg.out", {at::ones({3}), View({3})}, kInvalid},
  };
}

class OperatorAttackTest : public testing::Test {
 protected:
  explicit OperatorAttackTest(std::string how = "--serve") : how_(std::move(how)) {}

  void SetUp() override {
    std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/attack-XXXXXX");
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    std::ofstream(absl::StrCat(folder, "/key")) << "a key of thirty-two bytes, about\n";
    ASSERT_EQ(chmod(absl::StrCat(folder, "/key").c_str(), 0600), 0);
    served_ = std::make_unique<ChildProcess>(std::vector<std::string>{how_, folder});
    auto worker = Worker::Create(Options(folder, 0));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    ASSERT_EQ(served_->ReadLine(), "OK");
    // What a process reads and keeps once.
    for (int i = 0; i < 3; ++i) ExpectHonestCallsServed();
  }

  // An operator and its derivative.
  void ExpectHonestCallsServed() {
    const at::Tensor x = at::full({1000}, 2.0f).requires_grad_();
    Context context = worker_->NewContext();
    const auto y = worker_->CallOp(1, "aten::mul.Tensor", {x, x}, {.context = &context});
    ASSERT_TRUE(y.ok()) << y.status();
    ASSERT_TRUE((*y)[0].toTensor().detach().equal(at::full({1000}, 4.0f)));
    const absl::Status done = context.Backward({(*y)[0].toTensor().sum()});
    ASSERT_TRUE(done.ok()) << done;
    const auto gradient = context.Gradient(x);
    ASSERT_TRUE(gradient.ok()) << gradient.status();
    ASSERT_TRUE(gradient->equal(at::full({1000}, 4.0f)));
  }

  // The most that the worker has had since the last call, and what it has now.
  void AskMemory(int64_t* peak, int64_t* now) {
    const auto said = worker_->Call(1, "memory", {});
    ASSERT_TRUE(said.ok()) << said.status();
    const std::vector<std::string> words = absl::StrSplit(said->payload, ' ');
    ASSERT_TRUE(words.size() == 2 && absl::SimpleAtoi(words[0], peak) &&
                absl::SimpleAtoi(words[1], now))
        << said->payload;
  }

  // Whatever comes of it is an error of that code, within the limit, and no end of the worker.
  template <typename Run>
  void ExpectFails(StatusCode code, const Run& run) {
    int64_t peak = 0, before = 0, after = 0;
    ASSERT_NO_FATAL_FAILURE(AskMemory(&peak, &before));
    const absl::Status status = run();
    EXPECT_EQ(status.code(), code) << status;
    ASSERT_FALSE(absl::IsUnavailable(status)) << "the worker is gone: " << status;
    ASSERT_NO_FATAL_FAILURE(AskMemory(&peak, &after));
    if (kMeasures) {
      EXPECT_LE(peak - before, kMost) << "it took " << ((peak - before) >> 20) << " MiB";
    }
    ASSERT_NO_FATAL_FAILURE(ExpectHonestCallsServed());
  }

  void ExpectEachFails(const std::vector<Attack>& attacks) {
    for (const Attack& attack : attacks) {
      SCOPED_TRACE(attack.name);
      ASSERT_NO_FATAL_FAILURE(ExpectFails(
          attack.code, [&] { return worker_->CallOp(1, attack.name, attack.arguments).status(); }));
    }
  }

  // In good order, and so it has served to the end.
  void ExpectEndsWell() {
    const absl::Status ended = worker_->Shutdown(absl::Now() + absl::Minutes(1));
    EXPECT_TRUE(ended.ok()) << ended;
    EXPECT_EQ(served_->ReadLine(), "OK");
    EXPECT_EQ(served_->Wait(), 0);
  }

  const std::string how_;
  std::unique_ptr<ChildProcess> served_;
  std::unique_ptr<Worker> worker_;
};

TEST_F(OperatorAttackTest, EachCallGetsAnErrorWithinTheLimits) {
  ASSERT_NO_FATAL_FAILURE(ExpectEachFails(Attacks()));
  // What is no list of values at all.
  const std::vector<std::string> garbage = {"", "garbage", std::string(16, '\xff')};
  for (const std::string& words : garbage) {
    SCOPED_TRACE(absl::StrCat(words.size(), " bytes"));
    ASSERT_NO_FATAL_FAILURE(ExpectFails(StatusCode::kInvalidArgument, [&] {
      return worker_->Call(1, "aten::neg", {words, {}}).status();
    }));
  }
  // A byte of each of these would take sixteen: a value that is none, and a list of such.
  for (const bool as_list : {false, true}) {
    SCOPED_TRACE(as_list ? "a list" : "values");
    const uint32_t count = kMessageBytes - 1000;
    std::string words;
    WireWriter writer(&words);
    writer.U8(1);
    writer.U32(as_list ? 1 : count);
    if (as_list) {
      writer.U8(15);
      writer.U64(count);
    }
    words.append(count, '\0');
    ASSERT_NO_FATAL_FAILURE(ExpectFails(StatusCode::kResourceExhausted, [&] {
      return worker_->Call(1, "aten::neg", {words, {}}).status();
    }));
  }
  ExpectEndsWell();
}

class AllOperatorsAttackTest : public OperatorAttackTest {
 protected:
  AllOperatorsAttackTest() : OperatorAttackTest("--serve-all") {}
};

TEST_F(AllOperatorsAttackTest, EachCallGetsAnErrorWithinTheLimits) {
  ASSERT_NO_FATAL_FAILURE(ExpectEachFails(AttacksOnAll()));
  ExpectEndsWell();
}

// What comes and goes is small, and the gradient of what is between them is not.
TEST_F(OperatorAttackTest, EachPassGetsAnErrorWithinTheLimits) {
  const at::Tensor x = at::ones({1, 8000});
  const std::vector<Attack> attacks = {
      {"aten::take_along_dim",
       {x, at::zeros({8000, 1}, at::kLong), 1},
       StatusCode::kResourceExhausted},
      // Each difference keeps its nodes, though there is no element.
      {"aten::diff", {at::zeros({1 << 17, 0}), 1 << 17, 0}, StatusCode::kResourceExhausted},
  };
  for (const Attack& attack : attacks) {
    SCOPED_TRACE(attack.name);
    ASSERT_NO_FATAL_FAILURE(ExpectFails(attack.code, [&] {
      Context context = worker_->NewContext();
      Values arguments = attack.arguments;
      arguments[0] = arguments[0].toTensor().detach().requires_grad_();
      const auto y = worker_->CallOp(1, attack.name, arguments, {.context = &context});
      if (!y.ok()) return y.status();
      return context.Backward({(*y)[0].toTensor().sum()});
    }));
  }
  ExpectEndsWell();
}

// Many at a time: none is let through for the others' sake.
TEST_F(OperatorAttackTest, ManyAtATimeGetErrorsToo) {
  constexpr int kCalls = 64;
  ASSERT_NO_FATAL_FAILURE(ExpectFails(StatusCode::kResourceExhausted, [&] {
    const Message message =
        *EncodeValues(Values{at::ones({1}), Ints{static_cast<int64_t>(kMessageBytes)}});
    std::vector<Future<Message>> calls;
    for (int i = 0; i < kCalls; ++i) {
      calls.push_back(worker_->CallAsync(1, "aten::new_ones", message));
    }
    absl::Status last;
    for (const Future<Message>& call : calls) {
      last = call.Wait().status();
      EXPECT_EQ(last.code(), StatusCode::kResourceExhausted) << last;
    }
    return last;
  }));
  ExpectEndsWell();
}

// One worker for each: it is gone by the first that gets through. What the answer is does not
// matter, but that it is there, and that the worker has kept within its limits.
struct NumbersCall {
  std::string name;
  Values arguments;
};

std::vector<NumbersCall> CallsByNumbers() {
  const c10::IValue none;
  const at::Tensor x = at::ones({1});
  const at::Tensor least = at::full({1}, INT64_MIN, at::kLong);
  // 7 * kInverse is 1, as numbers of 64 bits are multiplied.
  constexpr int64_t kInverse = 0x6DB6DB6DB6DB6DB7;
  at::Tensor places = at::zeros({3, 1}, at::kLong);
  places.select(0, 0).fill_(9999);
  places.select(0, 1).fill_(999);
  return {
      // Divides INT64_MIN by -1, which the processor answers with SIGFPE.
      {"aten::div.Tensor_mode", {least, at::full({1}, -1, at::kLong), "trunc"}},
      {"aten::lcm", {least, at::full({1}, 7, at::kLong)}},
      {"aten::avg_pool2d",
       {least.view({1, 1, 1}), Ints{1, 1}, Ints{1, 1}, Ints{0, 0}, false, true, -1}},
      // Divides by a half, which is 0 as an integer.
      {"aten::arange.start_step", {0, 1, 0.5, static_cast<int64_t>(at::kLong)}},
      // Divides by no groups: only group_norm, which calls it, has looked at them.
      {"aten::native_group_norm_backward",
       {x, x, at::zeros({0}), at::zeros({0}), none, 1, 1, 1, 0,
        c10::List<bool>({true, false, false})}},
      // 1 * 7 * kInverse is the one element that there is, and kInverse are read for each group.
      {"aten::native_group_norm", {x, none, none, 1, 7, kInverse, 7, 1e-5}},
      // The place of an element in a line is made of a float that no int64_t holds.
      {"aten::upsample_nearest1d", {at::ones({1, 1, 1}, at::kByte), Ints{3}, 1e-30}},
      // A size below none, and no elements for what counts on it.
      {"aten::as_strided", {x, Ints{-1}, Ints{1}}},
      // oneDNN makes a kernel for that stride, which ends the process.
      {"aten::conv_transpose1d",
       {at::ones({2, 4, 10}), at::ones({4, 4, 3}), none, 1 << 16, 0, (1 << 16) - 1, 1, 1}},
      // Where such a window ends is no number of 32 bits.
      {"aten::max_pool2d",
       {at::ones({2, 4, 10, 10}), Ints{3, 3}, Ints{1, 1}, Ints{0, 0}, Ints{INT32_MAX, INT32_MAX},
        true}},
      // Divides by the number of heads.
      {"aten::scaled_dot_product_attention",
       {at::ones({2, 0, 5, 8}), at::ones({2, 0, 7, 8}), at::ones({2, 0, 7, 8}), none, 0.0, false,
        none, false}},
      // Divides by the number of values, which it takes for that of the keys, and reads as many.
      {"aten::scaled_dot_product_attention",
       {at::ones({1, 1, 1, 8}), at::ones({1, 1, 1, 8}), at::ones({1, 1, 0, 8})}},
      {"aten::scaled_dot_product_attention",
       {at::ones({1, 1, 64, 8}), at::ones({1, 1, 1, 8}), at::ones({1, 1, 1 << 16, 8})}},
      // oneDNN's layout, which has no memory for this dtype.
      {"aten::new_zeros",
       {at::ones({0, 2}), Ints{3}, static_cast<int64_t>(at::kBFloat16),
        static_cast<int64_t>(c10::Layout::Mkldnn)}},
      // Memory that no limit would see, and that stays.
      {"aten::zeros", {Ints{1 << 20}, none, none, none, true}},
      // A list of 24 bytes for each place of all dimensions but one: 240 MB here.
      {"aten::softmax.int",
       {at::sparse_coo_tensor(places, at::ones({1}), {10000, 1000, 1}), 2, none}},
  };
}

class OperatorNumbersTest : public OperatorAttackTest,
                            public testing::WithParamInterface<size_t> {};

INSTANTIATE_TEST_SUITE_P(Calls, OperatorNumbersTest,
                         testing::Range<size_t>(0, CallsByNumbers().size()));

TEST_P(OperatorNumbersTest, TheWorkerServesOn) {
  const NumbersCall call = CallsByNumbers()[GetParam()];
  SCOPED_TRACE(call.name);
  int64_t peak = 0, before = 0, after = 0;
  ASSERT_NO_FATAL_FAILURE(AskMemory(&peak, &before));
  const absl::Status status = worker_->CallOp(1, call.name, call.arguments).status();
  ASSERT_FALSE(absl::IsUnavailable(status)) << "the worker is gone: " << status;
  ASSERT_NO_FATAL_FAILURE(AskMemory(&peak, &after));
  if (kMeasures) {
    EXPECT_LE(peak - before, kMost) << "it took " << ((peak - before) >> 20) << " MiB";
  }
  ASSERT_NO_FATAL_FAILURE(ExpectHonestCallsServed());
  ExpectEndsWell();
}

// No tap of the window is inside: both rows are padding. libtorch takes the row behind the last one
// for the place of the largest element, and its derivative adds the gradient there.
TEST_F(OperatorAttackTest, APoolWhoseWindowsAreAllPaddingWritesNowhere) {
  for (int i = 0; i < 50; ++i) {
    Context context = worker_->NewContext();
    const at::Tensor x = at::ones({1, 1, 1 << 17}).requires_grad_();
    const auto y =
        worker_->CallOp(1, "aten::max_pool2d", {x, Ints{2, 1}, Ints{1, 1}, Ints{1, 0}, Ints{2, 1}},
                        {.context = &context});
    if (!y.ok()) {
      ASSERT_EQ(y.status().code(), StatusCode::kInvalidArgument) << y.status();
      continue;
    }
    const absl::Status done = context.Backward({((*y)[0].toTensor() * 1e30).sum()});
    ADD_FAILURE() << "it was served; its derivative wrote 512 KiB behind its gradient: " << done;
    ASSERT_NO_FATAL_FAILURE(ExpectHonestCallsServed());
  }
  ExpectEndsWell();
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 3 && argv[1] == std::string("--serve")) {
    return distgrad::RunServed(argv[2], distgrad::ServeOperators::kSafe);
  }
  if (argc == 3 && argv[1] == std::string("--serve-all")) {
    return distgrad::RunServed(argv[2], distgrad::ServeOperators::kAll);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
