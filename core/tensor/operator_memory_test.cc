// Looks for operators that take memory which no limit covers, they or their derivatives: whose
// lists, sizes or depth of recursion grow with a number, with the size of a tensor that has few
// elements or none, or with the elements that a view shows and does not have.
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/tensor/allocation_limit.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/operator.h"
#include "core/tensor/operator_policy.h"
#include "core/tensor/piece_count.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DG_SKIP_WITHOUT_LIMIT() \
  GTEST_SKIP() << "a sanitizer's own memory stands above every limit of addresses"
#else
#define DG_SKIP_WITHOUT_LIMIT()
#endif

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

// What elements may take in these tests, how many tensors there may be, and what is too much: what
// takes more than 64 bytes for each of a large size, besides its elements. These have room for some
// tensors of that size, without which few operators come as far as to what takes more.
constexpr uint64_t kElementBytes = 16 << 20;
constexpr int64_t kMaxTensors = 1024;
constexpr int64_t kTooMuch = 48 << 20;
constexpr int64_t kLarge = 1 << 19;  // as a number, or as the size of a dimension
// As a number of times that something is done again: of each time some kilobytes may remain, and
// few operators take long.
constexpr int64_t kTimes = 1 << 15;
// The elements of a view, of which each shows in a list, and few operators take long.
constexpr int64_t kMany = 1 << 23;
// What arguments may show, which is more here than an operator may allocate.
constexpr uint64_t kArgumentBytes = 64 << 20;

// Of a processor, for that many calls of one operator: few take long.
rlim_t SecondsFor(int tries) { return 10 + static_cast<rlim_t>(tries) / 40; }

// With one element, which is the last one.
at::Tensor Sparse(int64_t rows, int64_t columns) {
  const at::Tensor place = at::zeros({2, 1}, at::kLong);
  place[0][0] = rows - 1;
  place[1][0] = columns - 1;
  return at::sparse_coo_tensor(place, at::ones({1}), {rows, columns});
}

// Arguments of which one or two are large, but for their elements.
class LargeArguments {
 public:
  explicit LargeArguments(uint32_t seed) : random_(seed) {}

  std::optional<Values> Draw(const c10::FunctionSchema& schema) {
    shape_ = Below(kShapes);
    is_long_ = Below(3) == 0;
    Values arguments;
    for (const c10::Argument& argument : schema.arguments()) {
      length_ = argument.N();
      std::optional<c10::IValue> value = Of(argument.real_type());
      const bool usual = argument.default_value().has_value() && Below(2) == 0;
      if (!value.has_value() || usual) value = argument.default_value();
      if (!value.has_value()) return std::nullopt;
      arguments.push_back(*std::move(value));
    }
    return arguments;
  }

 private:
  static constexpr size_t kShapes = 16;
  static constexpr size_t kFirstSparse = 11;  // those from here on are sparse

  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }

  // Few operators take a sparse tensor together with another one that is not.
  size_t NextShape() {
    if (shape_ < kFirstSparse || Below(4) == 0) return Below(kShapes);
    return kFirstSparse + Below(kShapes - kFirstSparse);
  }

  // One of its own for each argument, as those that come with a message are.
  static at::Tensor OfShape(size_t shape) {
    switch (shape) {
      case 0:
        return at::zeros({kLarge, 0});
      case 1:
        return at::zeros({0, kLarge});
      case 2:
        return at::zeros({kLarge, 0, 0});
      case 3:
        return at::zeros({0, kLarge, 0});
      case 4:
        return at::ones({1}).expand({kLarge});
      case 5:
        return at::ones({1}, at::kDouble).expand({1, kLarge, 1});
      case 6:
        return at::ones({1}, at::kDouble).expand({kLarge, 1, 1});
      case 7:
        return at::ones({1}).expand({kLarge, 2});
      case 8:
        return at::ones({1}, at::kLong);
      case 9:
        return at::ones({1}).expand({kMany});
      case 10:
        return at::ones({1, 2});
      case kFirstSparse:
        return Sparse(kLarge, kLarge);
      case kFirstSparse + 1:
        return Sparse(kMany, kMany);
      case kFirstSparse + 2:
        return Sparse(1, kMany);
      case kFirstSparse + 3:
        return Sparse(kMany, 1);
      default:
        return Sparse(1, 1);
    }
  }

  std::optional<c10::IValue> Of(const c10::TypePtr& type) {
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        if (Below(3) == 0) shape_ = NextShape();
        return OfShape(shape_);
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType: {
        constexpr int64_t kNumbers[] = {0, 1, 2, kTimes, kLarge};
        return c10::IValue(kNumbers[Below(std::size(kNumbers))]);
      }
      case c10::TypeKind::FloatType:
      case c10::TypeKind::NumberType:
        return c10::IValue(Below(3) == 0 ? static_cast<double>(kLarge) : 1.0);
      case c10::TypeKind::BoolType:
        return c10::IValue(Below(2) == 1);
      case c10::TypeKind::StringType: {
        constexpr const char* kWords[] = {"sum", "mean", "ij", "constant", "linear"};
        return c10::IValue(kWords[Below(std::size(kWords))]);
      }
      case c10::TypeKind::OptionalType:
        if (Below(2) == 0) return c10::IValue();
        return Of(type->expectRef<c10::OptionalType>().getElementType());
      case c10::TypeKind::ListType: {
        const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
        c10::impl::GenericList list(element->kind() == c10::TypeKind::SymIntType
                                        ? c10::TypePtr(c10::IntType::get())
                                        : element);
        const std::optional<c10::IValue> one = Of(element);
        if (!one.has_value()) return std::nullopt;
        const size_t large = one->isTensor() ? 3000 : 100000;
        const size_t fits = static_cast<size_t>(length_.value_or(2));
        for (size_t i = is_long_ ? large : Below(2) == 0 ? 1 : fits; i > 0; --i) {
          list.push_back(*one);
        }
        return c10::IValue(std::move(list));
      }
      default:
        return std::nullopt;
    }
  }

  std::mt19937 random_;
  size_t shape_ = 0;               // of most of these arguments
  std::optional<int32_t> length_;  // that the list which is drawn has to have
  bool is_long_ = false;           // lists are, of these arguments
};

// What the system says of this process's memory: `name` is as in /proc/self/status.
int64_t StatusBytes(absl::string_view name) {
  FILE* const file = std::fopen("/proc/self/status", "re");
  if (file == nullptr) std::abort();
  char line[256];
  long long kilobytes = -1;
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    if (!absl::StartsWith(line, name)) continue;
    if (std::sscanf(line + name.size(), ": %lld kB", &kilobytes) == 1) break;
  }
  std::fclose(file);
  if (kilobytes < 0) std::abort();
  return kilobytes * 1024;
}
// The most bytes that it has had in memory since ForgetPeak().
int64_t PeakBytes() { return StatusBytes("VmHWM"); }
// Of libraries, what has been used of them.
int64_t FileBytes() { return StatusBytes("RssFile"); }
void ForgetPeak() {
  const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, "5", 1) != 1) std::abort();
  close(fd);
}

// Whether the worker that serves an operator would let it begin.
bool Passes(const c10::OperatorHandle& op, const Values& arguments) {
  const ShownTensors shown = CountShown(arguments);
  return CountPieces(op, arguments) <= kMaxTensors &&
         CountListBytes(op, arguments) <= int64_t{kElementBytes} && shown.bytes <= kArgumentBytes &&
         CheckAttention(op, arguments).ok() && CheckViews(op, arguments, shown).ok() &&
         CheckListLengths(op, arguments).ok();
}

// Those of values that a gradient can be had for.
std::vector<at::Tensor> Differentiable(const Values& values) {
  std::vector<at::Tensor> tensors;
  const auto add = [&tensors](const at::Tensor& tensor) {
    if (tensor.defined() && (tensor.is_floating_point() || tensor.is_complex())) {
      tensors.push_back(tensor);
    }
  };
  for (const c10::IValue& value : values) {
    if (value.isTensor()) add(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  }
  return tensors;
}

// Calls it, and asks for the gradients of its arguments as a pass would, if it is to. Returns
// whether the operator took the arguments.
bool Call(const c10::OperatorHandle& op, Values arguments, bool with_gradients) {
  std::vector<at::Tensor> leaves, results, gradients;
  if (with_gradients) {
    leaves = Differentiable(arguments);
    for (const at::Tensor& leaf : leaves) leaf.requires_grad_();
  }
  {
    const AllocationLimit limit(kElementBytes, "limit message_bytes");
    const absl::StatusOr<Values> values = CallOperator(op, std::move(arguments));
    if (!values.ok()) return false;
    if (leaves.empty()) return true;
    for (const at::Tensor& tensor : Differentiable(*values)) {
      if (tensor.requires_grad() && tensor.layout() == at::kStrided) results.push_back(tensor);
    }
  }
  if (results.empty()) return true;
  try {
    const AllocationLimit limit(kElementBytes, "limit message_bytes");
    // A view in which one element stands for all, as a peer may send it.
    for (const at::Tensor& result : results) {
      gradients.push_back(at::ones({}, result.options()).expand(result.sizes()));
    }
    torch::autograd::grad(results, leaves, gradients, /*retain_graph=*/std::nullopt,
                          /*create_graph=*/false, /*allow_unused=*/true);
  } catch (const std::exception&) {
    // A limit, or a derivative that there is not.
  }
  return true;
}

struct Found {
  int64_t most_bytes = 0;
  int most_at = 0;  // the try in which it took them
  int calls = 0;    // that the operator took
};
Found CallWithLarge(const c10::OperatorHandle& op, int tries, bool guarded) {
  LargeArguments draws(7);
  Found found;
  for (int i = 0; i < tries; ++i) {
    std::optional<Values> arguments = draws.Draw(op.schema());
    if (!arguments.has_value() || (guarded && !Passes(op, *arguments))) continue;
    malloc_trim(0);
    ForgetPeak();
    const int64_t before = PeakBytes(), files_before = FileBytes();
    found.calls += Call(op, *std::move(arguments), /*with_gradients=*/i % 2 == 1) ? 1 : 0;
    // A new process reads much of libtorch at its first operators, and at its first exception.
    const int64_t bytes = PeakBytes() - before - std::max<int64_t>(FileBytes() - files_before, 0);
    if (bytes > found.most_bytes) {
      found.most_bytes = bytes;
      found.most_at = i;
    }
    if (found.most_bytes > kTooMuch) break;
  }
  return found;
}

struct Search {
  std::map<std::string, std::string> flaws;  // by operator: what it took, or ended by
  int calls = 0;
};

// In another process, which an operator may end; then another one goes on behind it.
Search CallAllWithLarge(const std::vector<c10::OperatorHandle>& operators, int tries,
                        bool guarded) {
  at::set_num_threads(1);  // a forked process has no others
  Search search;
  size_t done = 0;
  while (done < operators.size()) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    const pid_t child = fork();
    if (child < 0) std::abort();
    if (child == 0) {
      close(STDERR_FILENO);  // thousands of warnings
      const rlimit room = {rlim_t{3} << 30, RLIM_INFINITY};
      setrlimit(RLIMIT_AS, &room);
      for (size_t i = done; i < operators.size(); ++i) {
        rusage used = {};
        getrusage(RUSAGE_SELF, &used);
        const auto seconds = static_cast<rlim_t>(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
        const rlimit processor = {seconds + SecondsFor(tries), RLIM_INFINITY};
        setrlimit(RLIMIT_CPU, &processor);
        const Found found = CallWithLarge(operators[i], tries, guarded);
        if (write(ends[1], &found, sizeof(found)) != sizeof(found)) _exit(1);
      }
      _exit(0);
    }
    close(ends[1]);
    Found found;
    while (read(ends[0], &found, sizeof(found)) == sizeof(found)) {
      if (found.most_bytes > kTooMuch) {
        search.flaws[NameOf(operators[done])] =
            absl::StrCat(found.most_bytes >> 20, " MiB at try ", found.most_at);
      }
      search.calls += found.calls;
      ++done;
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (done == operators.size()) break;
    // How long an operator works is another matter: some take a number for a count of steps.
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGXCPU) {
      search.flaws[NameOf(operators[done])] =
          WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "an exit";
    }
    ++done;
  }
  return search;
}

// As far as some calls show.
TEST(OperatorMemory, WhatIsServedTakesNoMemoryPastItsLimits) {
  DG_SKIP_WITHOUT_LIMIT();
  const char* const tries = std::getenv("DISTGRAD_TRIES");          // more find more
  const char* const only = std::getenv("DISTGRAD_ONLY_OPERATORS");  // a part of their names
  std::vector<c10::OperatorHandle> operators;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle.has_value() || !CheckServed(*handle).ok()) continue;
    if (only != nullptr && !absl::StrContains(NameOf(op), only)) continue;
    operators.push_back(*handle);
  }
  const Search search =
      CallAllWithLarge(operators, tries == nullptr ? 40 : std::atoi(tries), /*guarded=*/true);
  EXPECT_EQ(search.flaws, (std::map<std::string, std::string>()))
      << "these need a limit in piece_count.cc, or are not to be served";
  if (only == nullptr) {
    EXPECT_GT(search.calls, 2000);
  }
}

// It would find those that are known, were they not bounded.
TEST(OperatorMemory, TheSearchFindsWhatTakesMemory) {
  DG_SKIP_WITHOUT_LIMIT();
  std::vector<c10::OperatorHandle> operators;
  for (const c10::OperatorName& op :
       std::vector<c10::OperatorName>{{"aten::combinations", ""},
                                      {"aten::rnn_tanh", "input"},
                                      {"aten::roll", ""},
                                      {"aten::meshgrid", ""},
                                      {"aten::topk", ""},
                                      {"aten::mode", ""},
                                      {"aten::unique_dim", ""},
                                      {"aten::unique_consecutive", ""},
                                      {"aten::diff", ""},
                                      {"aten::mm", ""},
                                      {"aten::matmul", ""},
                                      {"aten::to_sparse_bsr", ""}}) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    ASSERT_TRUE(handle.has_value()) << op;
    operators.push_back(*handle);
  }
  // It stops at the first flaw of each; of few operators do most arguments fit together.
  const Search search = CallAllWithLarge(operators, 2000, /*guarded=*/false);
  for (const c10::OperatorHandle& each : operators) {
    EXPECT_EQ(search.flaws.count(NameOf(each)), 1u) << NameOf(each);
  }

  const auto neg = c10::Dispatcher::singleton().findSchema({"aten::neg", ""});
  ASSERT_TRUE(neg.has_value());
  const Search none = CallAllWithLarge({*neg}, 100, /*guarded=*/false);
  EXPECT_EQ(none.flaws, (std::map<std::string, std::string>()));
  EXPECT_GT(none.calls, 50);
}

}  // namespace
}  // namespace distgrad
