// Which of all operators that libtorch registers can be called from another worker, by the types of
// their arguments and results; and which of them a worker serves unless told otherwise.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/number_check.h"
#include "core/tensor/operator.h"
#include "core/tensor/operator_policy.h"
#include "core/tensor/piece_count.h"
#include "core/tensor/values.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DG_SKIP_WITHOUT_LIMIT() \
  GTEST_SKIP() << "a sanitizer's own memory stands above every limit of addresses"
#else
#define DG_SKIP_WITHOUT_LIMIT()
#endif

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

// A value that stands for any of a type; none where nothing can.
std::optional<c10::IValue> Sample(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return at::ones({1});
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return c10::IValue(int64_t{1});
    case c10::TypeKind::FloatType:
      return c10::IValue(0.5);
    case c10::TypeKind::NumberType:
      return c10::IValue(c10::complex<double>(1, 2));
    case c10::TypeKind::BoolType:
      return c10::IValue(true);
    case c10::TypeKind::StringType:
      return c10::IValue("text");
    case c10::TypeKind::DeviceObjType:
      return c10::IValue(at::Device(at::kCPU));
    case c10::TypeKind::OptionalType: {
      // None always can; so what matters is the other.
      return Sample(type->expectRef<c10::OptionalType>().getElementType());
    }
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
      std::optional<c10::IValue> one = Sample(element);
      if (!one.has_value()) return std::nullopt;
      c10::impl::GenericList list(element->kind() == c10::TypeKind::SymIntType
                                      ? c10::TypePtr(c10::IntType::get())
                                      : element);
      list.push_back(*std::move(one));
      return c10::IValue(std::move(list));
    }
    default:
      return std::nullopt;
  }
}

TEST(OperatorSchemas, EveryTypeOfEveryArgumentTravelsOrIsKnownNotTo) {
  std::map<std::string, std::set<std::string>> stuck;  // by type, who has it
  std::set<std::string> checked;
  size_t operators = 0;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!absl::StartsWith(op.name, "aten::")) continue;
    const auto found = c10::Dispatcher::singleton().findSchema(op);
    if (!found.has_value()) continue;
    ++operators;
    std::vector<c10::Argument> all = found->schema().arguments();
    all.insert(all.end(), found->schema().returns().begin(), found->schema().returns().end());
    for (const c10::Argument& argument : all) {
      const std::string type = argument.real_type()->str();
      if (stuck.count(type) > 0) stuck[type].insert(op.name);
      if (!checked.insert(type).second) continue;
      const std::optional<c10::IValue> value = Sample(argument.real_type());
      if (!value.has_value()) {
        stuck[type].insert(op.name);
        continue;
      }
      absl::StatusOr<Message> sent = EncodeValues({{*value}});
      ASSERT_TRUE(sent.ok()) << type << ": " << sent.status();
      absl::StatusOr<Values> received = DecodeValues(*std::move(sent), UINT64_MAX);
      ASSERT_TRUE(received.ok()) << type << ": " << received.status();
      ASSERT_EQ(received->size(), 1u);
      EXPECT_EQ((*received)[0].tagKind(), value->tagKind()) << type;
    }
  }
  EXPECT_GT(operators, 3000u);
  std::string report;
  for (const auto& [type, who] : stuck) {
    absl::StrAppend(&report, type, " (", who.size(), ")\n");
  }
  // Generators, storages, streams and objects are of one process; an optional generator can be left
  // out. The others are of one operator each: autograd's cache, the scheme of a quantized tensor,
  // and a symbolic truth.
  std::set<std::string> types;
  for (const auto& [type, who] : stuck) types.insert(type);
  EXPECT_EQ(types, (std::set<std::string>{"Dict(Tensor, Tensor)", "Generator?", "QScheme",
                                          "Storage", "Stream", "SymBool",
                                          "__torch__.torch.classes.rnn.CellParamsBase[]"}))
      << report;
}

TEST(OperatorSchemas, AllThatIsSafeOnlyComputes) {
  size_t safe = 0;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!CheckSafe(NameOf(op)).ok()) continue;
    ++safe;
    const auto found = c10::Dispatcher::singleton().findSchema(op);
    if (!found.has_value()) continue;
    for (const c10::Argument& argument : found->schema().arguments()) {
      const std::string type = argument.real_type()->str();
      EXPECT_NE(type, "Storage") << op;
      EXPECT_NE(type, "Stream") << op;
      for (const char* part : {"file", "path", "url"}) {
        EXPECT_FALSE(absl::StrContains(type, "str") && absl::StrContains(argument.name(), part))
            << op << " " << argument.name();
      }
    }
  }
  EXPECT_GT(safe, 1500u);
  EXPECT_TRUE(CheckSafe("aten::add.Tensor").ok());
  EXPECT_TRUE(CheckSafe("aten::__and__.Tensor").ok());
  EXPECT_TRUE(CheckSafe("aten::_foreach_add.List").ok());
  for (const char* name :
       {"aten::from_file", "aten::from_file.out", "aten::_sparse_coo_tensor_unsafe", "aten::set_",
        "aten::set_.source_Storage", "prim::Print", "profiler::_record_function_enter", "aten", "",
        "aten::_index_put_impl_", "xaten::add", "quantized::add",
        "aten::fbgemm_pack_quantized_matrix.KN", "aten::fbgemm_pack_gemm_matrix_fp16"}) {
    const absl::Status status = CheckSafe(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << name;
  }
}

// -------------------------------------------------------------- What writes without saying so

// Gives each tensor pages of its own, with none mapped before and behind them, and puts its
// elements at their end, or at their beginning: so whatever reads or writes beyond a tensor ends
// its process; or the same but for a few bytes, where `aligned`, as libtorch's own allocator
// aligns. Not thread-safe.
class GuardedAllocator final : public c10::Allocator {
 public:
  void Place(bool at_end, bool aligned) {
    at_end_ = at_end;
    aligned_ = aligned;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > kRoom) throw std::bad_alloc();
    if (bytes == 0) return {nullptr, at::kCPU};
    if (Free().empty()) Free().push_back(Map());
    char* const room = Free().back();
    Free().pop_back();
    const size_t taken = aligned_ ? (bytes + kAlignment - 1) / kAlignment * kAlignment : bytes;
    char* const data = at_end_ ? room + kRoom - taken : room;
    return {data, data, &GiveBack, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &GiveBack; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static constexpr size_t kRoom = 1 << 20;
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kSlot = 2 * kRoom;  // what is mapped begins at a multiple of it

  static std::vector<char*>& Free() {
    static auto& free = *new std::vector<char*>;
    return free;
  }
  static void GiveBack(void* data) {
    if (data == nullptr) return;
    Free().push_back(static_cast<char*>(data) - reinterpret_cast<uintptr_t>(data) % kSlot);
  }
  static char* Map() {
    void* const mapped =
        mmap(nullptr, 2 * kSlot, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const room =
        static_cast<char*>(mapped) + kSlot - reinterpret_cast<uintptr_t>(mapped) % kSlot;
    if (mprotect(room, kRoom, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    return room;
  }

  bool at_end_ = true;
  bool aligned_ = false;
};

bool HasAnyOf(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return absl::StrContains(name, part); });
}

// Arguments that may suit an operator: those of a type, small enough for whatever it makes of them.
class Arguments {
 public:
  explicit Arguments(uint32_t seed) : random_(seed) {
    const std::vector<std::vector<int64_t>> shapes = {{2}, {2, 2}, {2, 2}, {2, 2, 2}, {1, 2, 2, 2}};
    for (const std::vector<int64_t>& shape : shapes) tensors_.push_back(at::rand(shape));
    tensors_.push_back(at::zeros({2}, at::kLong));
    tensors_.push_back(at::ones({2}, at::kBool));
  }

  // None where nothing can be had for one of its types. `hostile`: those that are likely to come
  // past all checks but one, for they fit together but for indices, which may be anything.
  // `wild`: hostile ones, of which some have numbers at which arithmetic ends, or no elements.
  std::optional<Values> Draw(const c10::FunctionSchema& schema, bool hostile, bool wild = false) {
    first_ = true;
    hostile_ = hostile;
    wild_ = wild;
    is_of_integers_ = wild && Below(3) == 0;
    const auto& shapes = !wild           ? shapes_
                         : Below(4) == 0 ? empty_shapes_
                         : Below(3) == 0 ? large_shapes_
                                         : shapes_;
    shape_ = shapes[Below(shapes.size())];
    Values arguments;
    for (const c10::Argument& argument : schema.arguments()) {
      length_ = argument.N();
      std::optional<c10::IValue> value = Draw(argument.real_type(), argument.name());
      if (!value.has_value()) value = argument.default_value();
      if (!value.has_value()) return std::nullopt;
      arguments.push_back(*std::move(value));
    }
    return arguments;
  }

 private:
  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }

  // Behind the first one mostly vectors with an element for each of its channels: operators want
  // them for weights, and for statistics.
  at::Tensor Tensor(const std::string& name) {
    const bool first = std::exchange(first_, false);
    if (hostile_) {
      const bool alike = first || Below(3) > 0;
      const std::vector<int64_t>& shape = alike ? shape_ : shapes_[Below(shapes_.size())];
      if (HasAnyOf(name, {"ind", "target", "pivot", "offset", "length", "batch_sizes", "label",
                          "repeats", "sorter", "bag", "index"})) {
        return Indices(shape);
      }
      if (wild_ && (is_of_integers_ || Below(4) == 0)) return WildTensor(shape);
      if (first || Below(8) > 0) return at::rand(shape).clone();
    }
    const bool any = first || Below(3) == 0;
    return tensors_[any ? Below(tensors_.size()) : 0].clone();
  }

  // Of the type of the others, or of any.
  at::Tensor WildTensor(const std::vector<int64_t>& shape) {
    if (!is_of_integers_ || Below(8) == 0) {
      constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble,        at::kByte,
                                           at::kInt,   at::kBool,          at::kHalf,
                                           at::kShort, at::kComplexDouble, at::kBFloat16};
      at::Tensor tensor = at::empty(shape, at::kDouble);
      for (int64_t i = 0; i < tensor.numel(); ++i) tensor.data_ptr<double>()[i] = WildFloat();
      // An integer that a float has no place in is another one on another processor.
      const at::ScalarType type = kTypes[Below(std::size(kTypes))];
      return at::isFloatingType(type) || at::isComplexType(type)
                 ? tensor.to(type)
                 : tensor.nan_to_num(0, 1, 0).clamp(0, 100).to(type);
    }
    at::Tensor tensor = at::empty(shape, at::kLong);
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data_ptr<int64_t>()[i] = Below(2) == 0 ? -1 : WildInt();
    }
    return tensor;
  }

  int64_t WildInt() {
    constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
    // Times 7 it is 1, as numbers of 64 bits are multiplied.
    constexpr int64_t kInverse = 0x6DB6DB6DB6DB6DB7;
    constexpr int64_t kNumbers[] = {kLeast,
                                    -1,
                                    -(int64_t{1} << 31),
                                    0,
                                    1,
                                    2,
                                    3,
                                    7,
                                    int64_t{1} << 20,
                                    int64_t{1} << 32,
                                    int64_t{1} << 40,
                                    kInverse,
                                    std::numeric_limits<int64_t>::max()};
    return kNumbers[Below(std::size(kNumbers))];
  }

  double WildFloat() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr double kNumbers[] = {0,
                                   -1,
                                   1,
                                   2.5,
                                   1e-30,
                                   1e9,
                                   1e30,
                                   3e38,
                                   -3e38,
                                   -1e30,
                                   1e300,
                                   -1e300,
                                   0.5,
                                   -0.0,
                                   kInfinity,
                                   -kInfinity,
                                   std::numeric_limits<double>::quiet_NaN()};
    return kNumbers[Below(std::size(kNumbers))];
  }

  // Mostly good ones.
  at::Tensor Indices(const std::vector<int64_t>& shape) {
    constexpr int64_t kBad[] = {-1, -5, 7, 100000, int64_t{1} << 30, -(int64_t{1} << 30)};
    at::Tensor indices = at::zeros(shape, at::kLong);
    for (int64_t i = 0; i < indices.numel(); ++i) {
      indices.data_ptr<int64_t>()[i] =
          Below(3) == 0 ? kBad[Below(std::size(kBad))] : static_cast<int64_t>(Below(3));
    }
    return Below(3) == 0 ? indices.to(at::kInt) : indices.clone();
  }

  std::optional<c10::IValue> Draw(const c10::TypePtr& type, const std::string& name) {
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        return Tensor(name);
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        if (wild_ && Below(4) == 0) return c10::IValue(WildInt());
        if (wild_ && HasAnyOf(name, {"kernel", "stride", "dilation"}) && Below(2) == 0) {
          return c10::IValue(static_cast<int64_t>(Below(4)));
        }
        if (hostile_ && HasAnyOf(name, {"kernel", "stride", "dilation"})) return c10::IValue(1);
        if (hostile_ && absl::StrContains(name, "pad") && Below(2) == 0) return c10::IValue(0);
        return c10::IValue(static_cast<int64_t>(Below(4)) - 1);
      case c10::TypeKind::FloatType:
        if (wild_ && Below(2) == 0) return c10::IValue(WildFloat());
        return c10::IValue(static_cast<double>(Below(3)) / 2);
      case c10::TypeKind::NumberType:
        if (wild_ && Below(2) == 0) return c10::IValue(WildInt());
        if (wild_ && Below(2) == 0) return c10::IValue(WildFloat());
        return c10::IValue(static_cast<double>(Below(3)));
      case c10::TypeKind::BoolType:
        return c10::IValue(Below(2) == 1);
      case c10::TypeKind::StringType: {
        if (!hostile_) return std::nullopt;
        if (name == "rounding_mode") return c10::IValue(Below(2) == 0 ? "trunc" : "floor");
        if (name == "mode" && Below(2) == 0) {
          constexpr const char* kModes[] = {"constant", "reflect", "replicate", "circular"};
          return c10::IValue(kModes[Below(std::size(kModes))]);
        }
        constexpr const char* kWords[] = {"sum",  "mean", "prod", "amax",    "amin",   "max",
                                          "min",  "left", "none", "reduced", "linear", "fro",
                                          "same", "ij",   "L",    "tanh",    "add",    "multiply"};
        return c10::IValue(kWords[Below(std::size(kWords))]);
      }
      case c10::TypeKind::OptionalType:
        if (Below(4) == 0) return c10::IValue();
        return Draw(type->expectRef<c10::OptionalType>().getElementType(), name);
      case c10::TypeKind::ListType: {
        const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
        c10::impl::GenericList list(element->kind() == c10::TypeKind::SymIntType
                                        ? c10::TypePtr(c10::IntType::get())
                                        : element);
        const bool fits = hostile_ && length_.has_value() && Below(4) > 0;
        for (size_t i = fits ? static_cast<size_t>(*length_) : Below(4); i > 0; --i) {
          std::optional<c10::IValue> one = Draw(element, name);
          if (!one.has_value()) return std::nullopt;
          list.push_back(*std::move(one));
        }
        return c10::IValue(std::move(list));
      }
      case c10::TypeKind::ScalarTypeType:
        if (!wild_) return std::nullopt;
        return c10::IValue(static_cast<int64_t>(Below(at::NumScalarTypes)));
      case c10::TypeKind::LayoutType:
        if (!wild_) return std::nullopt;
        return c10::IValue(
            static_cast<int64_t>(Below(static_cast<size_t>(at::Layout::NumOptions))));
      case c10::TypeKind::MemoryFormatType:
        if (!wild_) return std::nullopt;
        return c10::IValue(
            static_cast<int64_t>(Below(static_cast<size_t>(at::MemoryFormat::NumOptions))));
      case c10::TypeKind::DeviceObjType:
        if (!wild_) return std::nullopt;
        return c10::IValue(at::Device(Below(3) == 0 ? at::kMeta : at::kCPU));
      default:
        return std::nullopt;  // a default will do
    }
  }

  const std::vector<std::vector<int64_t>> shapes_ = {
      {}, {1}, {2}, {3}, {2, 2}, {2, 3}, {2, 2, 2}, {3, 2, 2}, {1, 2, 2, 2}};
  const std::vector<std::vector<int64_t>> empty_shapes_ = {
      {0}, {0, 2}, {2, 0}, {2, 0, 2}, {0, 2, 2}, {1, 0, 2, 2}, {0, 1, 2, 2}, {1, 2, 0, 2}};
  // For what a kernel does several at a time, and of some the rest.
  const std::vector<std::vector<int64_t>> large_shapes_ = {
      {67}, {33, 33}, {2, 4, 33}, {4, 17, 17}, {2, 4, 9, 9}, {1, 4, 5, 5, 5}};
  std::mt19937 random_;
  std::vector<at::Tensor> tensors_;
  bool hostile_ = false;
  bool wild_ = false;
  bool is_of_integers_ = false;    // each tensor of these arguments, where they are wild
  std::optional<int32_t> length_;  // that the list which is drawn has to have
  std::vector<int64_t> shape_;     // of most tensors of these arguments, where they are hostile
  bool first_ = true;              // no tensor of these arguments has been drawn
};

void CollectTensors(const c10::IValue& value, std::vector<at::Tensor>* tensors) {
  if (value.isTensor() && value.toTensor().defined()) tensors->push_back(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& element : value.toListRef()) CollectTensors(element, tensors);
}

// Looks at each element: a result may reach beyond its memory, or have indices that do.
void Read(const at::Tensor& result) {
  try {
    if (result.layout() == at::kStrided) {
      result.clone();
    } else {
      result.to_dense();
    }
  } catch (const std::exception&) {
    // That is an answer, too.
  }
}

// Whether oneDNN is behind it, which counts on the alignment.
bool IsOfOneDnn(const c10::OperatorHandle& op) {
  return HasAnyOf(op.operator_name().name, {"mkldnn", "gelu", "conv", "lstm"});
}

constexpr int kTries = 200;

// Of what is served, for each operator: more find more.
int WildTries() {
  const char* const tries = std::getenv("DISTGRAD_TRIES");
  return tries == nullptr ? kTries : std::atoi(tries);
}

// Whether the two share memory, and autograd would not see in one what is written by the other.
bool HidesWrites(const at::Tensor& result, const at::Tensor& argument) {
  if (!result.has_storage() || !argument.has_storage() || result.numel() == 0 ||
      result.storage().data() != argument.storage().data()) {
    return false;
  }
  const int64_t before = argument._version();
  result.unsafeGetTensorImpl()->bump_version();
  return argument._version() == before;
}

// How many of some calls of the operator succeed, whether one has changed an argument, and whether
// a result of one hides what is written to an argument by it.
struct Outcome {
  int successes = 0;
  bool writes = false, hides = false;
};
Outcome CallOften(const c10::OperatorHandle& op, uint32_t seed, GuardedAllocator& allocator) {
  Arguments draws(seed);
  Outcome outcome;
  for (int i = 0; i < kTries; ++i) {
    allocator.Place(/*at_end=*/i % 4 != 3, IsOfOneDnn(op));
    const std::optional<Values> arguments = draws.Draw(op.schema(), /*hostile=*/i % 3 > 0);
    if (!arguments.has_value()) continue;
    std::vector<at::Tensor> given, before, made;
    for (const c10::IValue& argument : *arguments) CollectTensors(argument, &given);
    for (const at::Tensor& tensor : given) before.push_back(tensor.clone());
    const absl::StatusOr<Values> results = CallOperator(op, *arguments);
    if (!results.ok()) continue;
    ++outcome.successes;
    for (size_t k = 0; k < given.size(); ++k) {
      outcome.writes |= given[k]._version() != 0 || !given[k].sizes().equals(before[k].sizes()) ||
                        !at::allclose(given[k], before[k], 0, 0, /*equal_nan=*/true);
    }
    for (const c10::IValue& result : *results) CollectTensors(result, &made);
    for (const at::Tensor& tensor : made) {
      Read(tensor);
      for (const at::Tensor& argument : given) outcome.hides |= HidesWrites(tensor, argument);
    }
  }
  return outcome;
}

// Whether the worker that serves an operator would let it begin.
bool Passes(const c10::OperatorHandle& op, const Values& arguments) {
  constexpr int64_t kMostTensors = 1000, kMostBytes = 1 << 20;
  const ShownTensors shown = CountShown(arguments);
  return CountPieces(op, arguments) <= kMostTensors &&
         CountListBytes(op, arguments) <= kMostBytes && shown.bytes <= uint64_t{kMostBytes} &&
         CheckAttention(op, arguments).ok() && CheckViews(op, arguments, shown).ok() &&
         CheckListLengths(op, arguments).ok() && CheckNumbers(op, arguments).ok();
}

// Asks for the gradients of some arguments, as a pass would.
void AskGradients(const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& made) {
  std::vector<at::Tensor> results, gradients;
  for (const at::Tensor& result : made) {
    if (result.requires_grad() && result.layout() == at::kStrided) results.push_back(result);
  }
  if (results.empty()) return;
  std::vector<at::Tensor> given;
  for (const at::Tensor& leaf : leaves) {
    if (leaf.requires_grad()) given.push_back(leaf);
  }
  try {
    for (const at::Tensor& result : results) {
      gradients.push_back(at::ones(result.sizes(), result.options()));
    }
    for (const at::Tensor& gradient :
         torch::autograd::grad(results, given, gradients, /*retain_graph=*/std::nullopt,
                               /*create_graph=*/false, /*allow_unused=*/true)) {
      if (gradient.defined()) Read(gradient);
    }
  } catch (const std::exception&) {
    // That is an answer, too.
  }
}

// With numbers of any size, as far as they pass; `guarded`: as a worker would let them.
Outcome CallWildly(const c10::OperatorHandle& op, uint32_t seed, GuardedAllocator& allocator,
                   bool guarded) {
  Arguments draws(seed);
  Outcome outcome;
  for (int i = 0; i < WildTries(); ++i) {
    allocator.Place(/*at_end=*/i % 4 != 3, IsOfOneDnn(op));
    const std::optional<Values> arguments =
        draws.Draw(op.schema(), /*hostile=*/true, /*wild=*/true);
    if (!arguments.has_value() || (guarded && !Passes(op, *arguments))) continue;
    std::vector<at::Tensor> given, made;
    for (const c10::IValue& argument : *arguments) CollectTensors(argument, &given);
    if (i % 2 == 0) {
      for (const at::Tensor& tensor : given) {
        if (tensor.is_floating_point()) tensor.requires_grad_();
      }
    }
    const absl::StatusOr<Values> results = CallOperator(op, *arguments);
    if (!results.ok()) continue;
    ++outcome.successes;
    if (guarded && !CheckSizes(*results).ok()) continue;
    for (const c10::IValue& result : *results) CollectTensors(result, &made);
    for (const at::Tensor& tensor : made) Read(tensor);
    AskGradients(given, made);
  }
  return outcome;
}

// The same for each of some operators, in another process: one that takes its arguments on trust
// may write anywhere, or never end. Where it ends that process, another one goes on behind it, and
// `ends` has what it ended by.
template <typename Call>
std::vector<Outcome> CallAll(const std::vector<c10::OperatorHandle>& operators, rlim_t most_seconds,
                             const Call& call, std::map<std::string, std::string>* ends) {
  at::set_num_threads(1);  // a forked process has no others
  std::vector<Outcome> outcomes;
  while (outcomes.size() < operators.size()) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) std::abort();
    const pid_t child = fork();
    if (child < 0) std::abort();
    if (child == 0) {
      close(STDERR_FILENO);  // thousands of warnings
      static GuardedAllocator allocator;
      c10::SetCPUAllocator(&allocator, /*priority=*/255);
      for (size_t i = outcomes.size(); i < operators.size(); ++i) {
        rusage used = {};
        getrusage(RUSAGE_SELF, &used);
        const auto seconds = static_cast<rlim_t>(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
        const rlimit processor = {seconds + most_seconds, RLIM_INFINITY};
        setrlimit(RLIMIT_CPU, &processor);
        const Outcome made = call(operators[i], allocator);
        if (write(pipe_ends[1], &made, sizeof(made)) != sizeof(made)) _exit(1);
      }
      _exit(0);
    }
    close(pipe_ends[1]);
    Outcome outcome;
    while (read(pipe_ends[0], &outcome, sizeof(outcome)) == sizeof(outcome)) {
      outcomes.push_back(outcome);
    }
    close(pipe_ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (outcomes.size() == operators.size()) break;
    (*ends)[NameOf(operators[outcomes.size()])] =
        WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "an exit";
    outcomes.emplace_back();
  }
  return outcomes;
}

std::vector<Outcome> CallAllOften(const std::vector<c10::OperatorHandle>& operators, uint32_t seed,
                                  std::map<std::string, std::string>* ends) {
  return CallAll(
      operators, /*most_seconds=*/30,
      [seed](const c10::OperatorHandle& op, GuardedAllocator& allocator) {
        return CallOften(op, seed, allocator);
      },
      ends);
}

std::vector<Outcome> CallAllWildly(const std::vector<c10::OperatorHandle>& operators, uint32_t seed,
                                   bool guarded, std::map<std::string, std::string>* ends) {
  std::vector<Outcome> outcomes = CallAll(
      operators, /*most_seconds=*/3 + WildTries() / 50,
      [seed, guarded](const c10::OperatorHandle& op, GuardedAllocator& allocator) {
        // operator_memory_test.cc is about lists of any length.
        const rlimit room = {rlim_t{8} << 30, RLIM_INFINITY};
        setrlimit(RLIMIT_AS, &room);
        return CallWildly(op, seed, allocator, guarded);
      },
      ends);
  // How long an operator works is another matter: some take a number for a count of steps.
  for (auto end = ends->begin(); end != ends->end();) {
    end = end->second == strsignal(SIGXCPU) ? ends->erase(end) : std::next(end);
  }
  return outcomes;
}

// What peers may call survives whatever they call it with, as far as some calls show; and what is
// functional, which Rust has for safe, writes to no argument.
TEST(OperatorSchemas, WhatIsSafeSurvivesItsArgumentsAndWritesOnlyWhatItSays) {
  constexpr uint32_t kSeed = 16;  // with others it may find more
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::vector<c10::OperatorHandle> operators;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle.has_value() || !CheckSafe(NameOf(op)).ok()) continue;
    operators.push_back(*handle);
  }
  std::map<std::string, std::string> ends;
  const std::vector<Outcome> outcomes = CallAllOften(operators, kSeed, &ends);
  EXPECT_EQ(ends, (std::map<std::string, std::string>()))
      << "these, or what was called before them, belong to kTrusting in operator_policy.cc";
  std::set<std::string> writes, hides;
  int functional = 0, successes = 0;
  for (size_t i = 0; i < operators.size(); ++i) {
    if (!CheckFunctional(NameOf(operators[i])).ok()) continue;
    ++functional;
    successes += outcomes[i].successes;
    if (outcomes[i].writes) writes.insert(NameOf(operators[i]));
    if (outcomes[i].hides) hides.insert(NameOf(operators[i]));
  }
  EXPECT_EQ(writes, std::set<std::string>()) << "CheckFunctional() is to refuse these";
  EXPECT_EQ(hides, std::set<std::string>()) << "these belong to kHiding in operator_policy.cc";
  EXPECT_GT(functional, 1000);
  EXPECT_GT(successes, 20000);
}

// The same for numbers at which arithmetic ends and for tensors without elements, and for the
// derivatives of what is computed of them.
TEST(OperatorSchemas, WhatIsServedSurvivesNumbersOfAnySize) {
  DG_SKIP_WITHOUT_LIMIT();
  constexpr uint32_t kSeed = 24;  // with others it finds more
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::vector<c10::OperatorHandle> operators;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle.has_value() || !CheckServed(*handle).ok()) continue;
    operators.push_back(*handle);
  }
  std::map<std::string, std::string> ends;
  int successes = 0;
  for (const Outcome& outcome : CallAllWildly(operators, kSeed, /*guarded=*/true, &ends)) {
    successes += outcome.successes;
  }
  EXPECT_EQ(ends, (std::map<std::string, std::string>()))
      << "number_check.h is to refuse what ends these, or they are not to be served";
  EXPECT_GT(successes, 20000);
}

// Those that are known to write are refused, and the search would find them.
TEST(OperatorSchemas, SomeWriteWithoutSayingSo) {
  std::vector<c10::OperatorHandle> operators;
  for (const char* name : {"aten::batch_norm", "aten::instance_norm"}) {
    const auto handle = c10::Dispatcher::singleton().findSchema({name, ""});
    ASSERT_TRUE(handle.has_value()) << name;
    EXPECT_FALSE(handle->schema().is_mutable()) << name;
    operators.push_back(*handle);
  }
  std::map<std::string, std::string> ends;
  for (const Outcome& outcome : CallAllOften(operators, 16, &ends)) EXPECT_TRUE(outcome.writes);
  EXPECT_EQ(ends, (std::map<std::string, std::string>()));
  for (const char* name :
       {"aten::batch_norm", "aten::instance_norm", "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm", "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts", "aten::sparse_coo_tensor.indices"}) {
    EXPECT_EQ(CheckFunctional(name).code(), absl::StatusCode::kPermissionDenied) << name;
    EXPECT_TRUE(CheckSafe(name).ok()) << "peers may call " << name << ": they have copies";
  }
  for (const char* name :
       {"aten::cov", "aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d"}) {
    EXPECT_EQ(CheckFunctional(name).code(), absl::StatusCode::kPermissionDenied) << name;
  }
  for (const char* name :
       {"aten::cudnn_batch_norm_backward", "aten::layer_norm", "aten::group_norm"}) {
    EXPECT_TRUE(CheckFunctional(name).ok()) << name;
  }
}

// What CheckNumbers() refuses, the search finds where nothing is refused.
TEST(OperatorSchemas, TheSearchFindsWhatNumbersEnd) {
  DG_SKIP_WITHOUT_LIMIT();
  std::vector<c10::OperatorHandle> operators;
  for (const c10::OperatorName& op :
       std::initializer_list<c10::OperatorName>{{"aten::div", "Tensor_mode"},
                                                {"aten::lcm", ""},
                                                {"aten::smooth_l1_loss_backward", ""},
                                                {"aten::fbgemm_linear_quantize_weight", ""}}) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    ASSERT_TRUE(handle.has_value()) << op;
    operators.push_back(*handle);
  }
  std::map<std::string, std::string> ends;
  // Some of them need more than one.
  for (const uint32_t seed : {24u, 7u, 1u, 2u}) {
    CallAllWildly(operators, seed, /*guarded=*/false, &ends);
  }
  for (const c10::OperatorHandle& op : operators)
    EXPECT_EQ(ends.count(NameOf(op)), 1u) << op.operator_name();
}

// A process that an operator ends is no end of the search.
TEST(OperatorSchemas, TheSearchFindsWhatTrustsItsArguments) {
  const std::set<std::pair<std::string, std::string>> trusting = {
      {"aten::_foreach_copy", ""},
      {"aten::adaptive_max_pool2d_backward", ""},     // indices of what it is given
      {"aten::sparse_csr_tensor", "crow_col_value"},  // and of what it makes
      {"aten::max_pool2d_with_indices_backward", ""},
  };
  std::vector<c10::OperatorHandle> operators;
  const auto add = [&operators](const c10::OperatorName& op) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    ASSERT_TRUE(handle.has_value()) << op;
    operators.push_back(*handle);
  };
  for (const auto& [name, overload] : trusting) add({name, overload});
  add({"aten::batch_norm", ""});
  std::map<std::string, std::string> ends;
  const std::vector<Outcome> outcomes = CallAllOften(operators, 16, &ends);
  ASSERT_EQ(outcomes.size(), operators.size());
  EXPECT_EQ(ends.size(), trusting.size());
  EXPECT_EQ(ends.count("aten::batch_norm"), 0u);
  EXPECT_TRUE(outcomes.back().writes);
}

// Those that trust their arguments are nobody's but by name.
TEST(OperatorSchemas, WhatTrustsItsArgumentsIsRefused) {
  for (const char* name :
       {"aten::_foreach_copy", "aten::lstm.data", "aten::native_batch_norm",
        "aten::reflection_pad3d", "aten::reflection_pad3d.out", "aten::slow_conv3d",
        "aten::ctc_loss.IntList", "aten::embedding_bag", "aten::max_pool2d_with_indices_backward",
        "aten::gru.input", "aten::lstm_cell", "aten::repeat_interleave.self_Tensor",
        "aten::sparse_csr_tensor.crow_col_value_size", "aten::sparse_coo_tensor.indices_size",
        "aten::log_sigmoid.out", "aten::log_sigmoid_forward.output", "aten::linalg_slogdet.out",
        "aten::native_channel_shuffle"}) {
    const absl::Status status = CheckSafe(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << name;
    EXPECT_TRUE(absl::StrContains(status.message(), "does not check that its arguments fit"))
        << status;
    EXPECT_EQ(CheckFunctional(name).code(), absl::StatusCode::kPermissionDenied) << name;
  }
  for (const char* name :
       {"aten::rnn_tanh.input", "aten::_foreach_add.List", "aten::embedding",
        "aten::repeat_interleave.self_int", "aten::to_sparse", "aten::sparse_coo_tensor.indices",
        "aten::nll_loss", "aten::log_sigmoid", "aten::log_sigmoid_forward", "aten::linalg_slogdet",
        "aten::channel_shuffle"}) {
    EXPECT_TRUE(CheckSafe(name).ok()) << name;
  }
}

// Of what returns a list of tensors. The others return no more than go in, or than a tensor has
// dimensions or a recurrent network has states.
TEST(OperatorSchemas, WhatReturnsAnyNumberOfTensorsIsKnown) {
  std::set<std::string> lists;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!CheckSafe(NameOf(op)).ok() || CutsIntoPieces(NameOf(op))) continue;
    const auto found = c10::Dispatcher::singleton().findSchema(op);
    if (!found.has_value() || absl::StartsWith(op.name, "aten::_foreach_")) continue;
    for (const c10::Argument& result : found->schema().returns()) {
      if (result.real_type()->kind() == c10::TypeKind::ListType) lists.insert(op.name);
    }
  }
  EXPECT_EQ(lists, (std::set<std::string>{
                       "aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d",
                       "aten::broadcast_tensors", "aten::dequantize", "aten::gradient",
                       "aten::lstm_mps_backward", "aten::meshgrid", "aten::miopen_rnn_backward",
                       "aten::nonzero_numpy", "aten::quantize_per_tensor",
                       "aten::unflatten_dense_tensors", "aten::where"}));
}

void ExpectPieces(const std::string& name, const Values& arguments) {
  const c10::OperatorHandle op = FindOperator(name).value();
  const absl::StatusOr<Values> results = CallOperator(op, arguments);
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(CountPieces(op, arguments), (*results)[0].toTensorVector().size())
      << name << " of " << arguments[0].toTensor().sizes();
}

TEST(OperatorSchemas, PiecesAreCounted) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const auto any = [&](int from, int to) {
      return std::uniform_int_distribution<int64_t>(from, to)(random);
    };
    std::vector<int64_t> sizes = {any(0, 9), any(0, 9), any(0, 9)};
    const at::Tensor x = at::ones(sizes);
    const int64_t dimension = any(-3, 2);
    const int64_t size = x.size(dimension);
    const std::vector<int64_t> places(any(0, 4), 1);
    SCOPED_TRACE(absl::StrCat("dimension ", dimension));
    for (const std::string prefix : {"aten::", "aten::unsafe_"}) {
      ExpectPieces(prefix + "chunk", {x, any(1, 12), dimension});
      ExpectPieces(prefix + "split.Tensor", {x, any(1, 12), dimension});
      ExpectPieces(prefix + "split_with_sizes", {x, std::vector<int64_t>{size, 0, 0}, dimension});
    }
    ExpectPieces("aten::split.sizes", {x, std::vector<int64_t>{0, size}, dimension});
    ExpectPieces("aten::split_copy.Tensor", {x, any(1, 12), dimension});
    ExpectPieces("aten::unbind.int", {x, dimension});
    ExpectPieces("aten::unbind_copy.int", {x});
    ExpectPieces("aten::tensor_split.sections", {x, any(1, 12), dimension});
    ExpectPieces("aten::tensor_split.indices", {x, places, dimension});
    ExpectPieces("aten::tensor_split.tensor_indices_or_sections",
                 {x, at::full({}, any(1, 12), at::kLong), dimension});
    ExpectPieces("aten::tensor_split.tensor_indices_or_sections",
                 {x, at::ones({any(0, 4)}, at::kLong), dimension});
    ExpectPieces("aten::hsplit.array", {x, places});
    ExpectPieces("aten::vsplit.int", {at::ones({6, 1}), any(1, 3)});
    ExpectPieces("aten::dsplit.int", {at::ones({1, 1, 6}), any(1, 3)});
    ExpectPieces("aten::split.Tensor", {x, true, true});
  }
  EXPECT_EQ(CountPieces(FindOperator("aten::neg").value(), {at::ones({3})}), 0);
}

// Through a message and back, as a call does it.
Values Call(absl::string_view name, Values arguments) {
  absl::StatusOr<Message> sent = EncodeValues(arguments);
  EXPECT_TRUE(sent.ok()) << sent.status();
  absl::StatusOr<Values> received = DecodeValues(*std::move(sent), UINT64_MAX);
  EXPECT_TRUE(received.ok()) << received.status();
  absl::StatusOr<Values> results = CallOperator(name, *std::move(received));
  EXPECT_TRUE(results.ok()) << results.status();
  return results.ok() ? *std::move(results) : Values(4);
}

TEST(OperatorSchemas, KindsOfArguments) {
  const at::Tensor a = at::arange(6, at::kFloat).view({2, 3});
  // Complex scalars, strings, dtypes and devices; masks; none for what is optional.
  EXPECT_TRUE(Call("aten::mul.Scalar", {a, c10::complex<double>(0, 1)})[0].toTensor().equal(
      at::mul(a, c10::complex<double>(0, 1))));
  EXPECT_TRUE(Call("aten::div.Tensor_mode", {a, at::full({}, 2), "floor"})[0].toTensor().equal(
      at::div(a, at::full({}, 2), "floor")));
  EXPECT_TRUE(
      Call("aten::einsum", {"ij->ji", std::vector<at::Tensor>{a}})[0].toTensor().equal(a.t()));
  EXPECT_EQ(Call("aten::to.device", {a, at::Device(at::kCPU), static_cast<int64_t>(at::kHalf)})[0]
                .toTensor()
                .scalar_type(),
            at::kHalf);
  EXPECT_TRUE(Call("aten::contiguous",
                   {a.view({1, 2, 3, 1}), static_cast<int64_t>(at::MemoryFormat::ChannelsLast)})[0]
                  .toTensor()
                  .is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(Call("aten::empty.memory_format",
                 {std::vector<int64_t>{2}, c10::IValue(), static_cast<int64_t>(at::kStrided)})[0]
                .toTensor()
                .layout(),
            at::kStrided);
  EXPECT_TRUE(Call("aten::clamp", {a, c10::IValue(), 3})[0].toTensor().equal(
      at::clamp(a, std::nullopt, 3)));
  EXPECT_TRUE(Call("aten::upsample_nearest2d.vec",
                   {a.view({1, 1, 2, 3}), c10::IValue(), std::vector<double>{2.0, 2.0}})[0]
                  .toTensor()
                  .equal(at::upsample_nearest2d(a.view({1, 1, 2, 3}), {4, 6})));
  // A list of numbers of several types.
  c10::impl::GenericList numbers(c10::NumberType::get());
  numbers.push_back(int64_t{2});
  numbers.push_back(0.5);
  EXPECT_TRUE(Call("aten::_foreach_mul.ScalarList", {std::vector<at::Tensor>{a, a}, numbers})[0]
                  .toTensorVector()[1]
                  .equal(at::mul(a, 0.5)));
  EXPECT_TRUE(Call("aten::randn.generator", {std::vector<int64_t>{2}, c10::IValue()})[0]
                  .toTensor()
                  .defined());
}

TEST(OperatorSchemas, AGeneratorIsRefusedByName) {
  const absl::Status status =
      EncodeValues({{std::vector<int64_t>{2}, at::detail::createCPUGenerator(1)}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(status.message(), "Generator")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "value 1")) << status;
}

}  // namespace
}  // namespace distgrad
