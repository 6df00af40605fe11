// Registers the device's allocator, guard and kernels, which check the order of streams.
#include "tests/testing/fake_device/fake_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "tests/testing/fake_device/timeline.h"

namespace distgrad::fake_device {
namespace {

constexpr auto kType = c10::DeviceType::HPU;

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};  // 0 is the default stream
thread_local bool in_kernel = false;

std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> live_bytes[kDevices];

constexpr int kNoFailure = -1, kHasFailed = -2;
std::atomic<int> uses_until_failure{kNoFailure};

void UseEvent() {
  int left = uses_until_failure;
  while (left >= 0) {
    if (!uses_until_failure.compare_exchange_weak(left, left == 0 ? kHasFailed : left - 1))
      continue;
    TORCH_CHECK(left != 0, "fake device: an event failed");
    return;
  }
}

void Check(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "no such fake device: ", int{device});
}

c10::DeviceIndex IndexOf(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

StreamKey KeyOf(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
StreamKey CurrentKey(c10::Device device) {
  const c10::DeviceIndex index = IndexOf(device);
  return {index, current_stream[index]};
}

// libtorch takes no second accelerator, and finds a GPU only where CUDA shows one.
[[maybe_unused]] const int gpus_hidden = setenv("CUDA_VISIBLE_DEVICES", "", /*replace=*/1);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old(kType, current_device);
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    Check(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream Make(c10::DeviceIndex device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, {kType, device}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return Make(IndexOf(device), current_stream[IndexOf(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return Make(IndexOf(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return Make(IndexOf(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    UseEvent();
    if (*event == nullptr) *event = new VectorClock;
    *static_cast<VectorClock*>(*event) = Timeline::Get().Record(KeyOf(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    UseEvent();
    if (event != nullptr) Timeline::Get().Wait(KeyOf(stream), *static_cast<VectorClock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<VectorClock*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::Get().WaitOnHost(KeyOf(stream));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Timeline::Get().WaitOnHost(*static_cast<VectorClock*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Synchronize(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_context() == nullptr) return;
    Timeline::Get().RecordUse(static_cast<Block*>(data.get_context()), KeyOf(stream));
  }
};

struct Allocator final : c10::Allocator {
  static void Delete(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    if (block == nullptr) return;
    Timeline::Get().Free(*block);
    live_bytes[block->owner.first] -= static_cast<int64_t>(block->bytes);
    std::free(block->data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, nullptr, &Delete, device};
    auto block = std::make_unique<Block>();
    block->owner = CurrentKey(device);
    block->bytes = bytes;
    TORCH_CHECK(posix_memalign(&block->data, 64, bytes) == 0, "out of memory");
    live_bytes[current_device] += static_cast<int64_t>(bytes);
    void* const data = block->data;
    return {data, block.release(), &Delete, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Hooks final : at::HPUHooksInterface {
  explicit Hooks(at::HPUHooksArgs) {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Check(device);
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    Check(device);
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

// ---- kernels ----

bool OnDevice(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

void AddBlock(const at::Tensor& tensor, std::vector<Block*>* blocks) {
  void* const context = tensor.storage().data_ptr().get_context();
  if (context != nullptr) blocks->push_back(static_cast<Block*>(context));
}

void Launch(StreamKey stream, const std::vector<Block*>& reads, const std::vector<Block*>& writes) {
  if (in_kernel) return;  // what a kernel does inside is its own
  const std::string wrong = Timeline::Get().Launch(stream, reads, writes);
  TORCH_CHECK(wrong.empty(), "fake device: ", wrong);
}

class KernelScope {
 public:
  KernelScope() : was_(std::exchange(in_kernel, true)) {}
  ~KernelScope() { in_kernel = was_; }

 private:
  const bool was_;
};

template <typename Visit>
void VisitTensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) visit(*tensor);
    }
  }
}

// Every operator without a kernel below: on the CPU, as one kernel on the current stream.
void RunOnCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<Block*> reads, writes;
  std::optional<c10::Device> device;
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    VisitTensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (!OnDevice(tensor)) return;
      if (!device.has_value()) device = tensor.device();
      TORCH_CHECK(tensor.device() == *device, "fake device: ", op.schema().name(),
                  " has arguments on ", tensor.device(), " and on ", *device);
      AddBlock(tensor, written ? &writes : &reads);
    });
  }
  const c10::OptionalDeviceGuard guard(device);
  const StreamKey stream = CurrentKey(device.value_or(c10::Device(kType, current_device)));
  Launch(stream, reads, writes);
  {
    const KernelScope kernel;
    at::native::cpu_fallback(op, stack);
  }
  std::vector<Block*> results;
  for (const c10::IValue& value : *stack) {
    VisitTensors(value, [&](const at::Tensor& tensor) {
      if (OnDevice(tensor)) AddBlock(tensor, &results);
    });
  }
  Launch(stream, {}, results);
}

// The same memory seen as a CPU tensor.
at::Tensor OnHost(const at::Tensor& tensor) {
  if (!OnDevice(tensor)) return tensor;
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      [tensor](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  Timeline& timeline = Timeline::Get();
  std::vector<Block*> reads, writes;
  if (OnDevice(from)) AddBlock(from, &reads);
  if (OnDevice(to)) AddBlock(to, &writes);
  // On the source's stream, as CUDA does; the target's comes before and after it.
  const StreamKey stream = CurrentKey(OnDevice(from) ? from.device() : to.device());
  const bool between_devices = OnDevice(from) && OnDevice(to) && from.device() != to.device();
  if (between_devices) timeline.Wait(stream, timeline.Record(CurrentKey(to.device())));
  Launch(stream, reads, writes);
  if (between_devices) timeline.Wait(CurrentKey(to.device()), timeline.Record(stream));
  if (!OnDevice(to) && !in_kernel) timeline.WaitOnHost(stream);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  OnHost(to).copy_(OnHost(from));
  return to;
}

at::Scalar LocalScalar(const at::Tensor& tensor) {
  std::vector<Block*> reads;
  AddBlock(tensor, &reads);
  const StreamKey stream = CurrentKey(tensor.device());
  Launch(stream, reads, {});
  if (!in_kernel) Timeline::Get().WaitOnHost(stream);
  return at::native::_local_scalar_dense_cpu(OnHost(tensor));
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::HPU);

at::Tensor Empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& Resize(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());  // resize_ allocates on the current device
  return at::native::resize_(tensor, sizes, format);
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  Resize(to, from.sizes(), std::nullopt);
  return CopyFrom(from, to, false);
}

at::Tensor& SetSource(at::Tensor& result, at::Storage storage, int64_t offset,
                      c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(result, std::move(storage), offset, sizes, strides);
}

at::Tensor AsStrided(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

at::Tensor View(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  return at::native::view(tensor, sizes);
}

at::Tensor ReshapeAlias(const at::Tensor& tensor, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  return at::native::_reshape_alias(tensor, sizes, strides);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, HPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyStrided);
  library.impl("_copy_from", &CopyFrom);
  library.impl("_copy_from_and_resize", &CopyFromAndResize);
  library.impl("_local_scalar_dense", &LocalScalar);
  library.impl("as_strided", &AsStrided);
  library.impl("view", &View);
  library.impl("_reshape_alias", &ReshapeAlias);
  library.impl("resize_", &Resize);
  library.impl("set_.source_Storage_storage_offset", &SetSource);
}

c10::Device Device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream NewStream(int device) { return Guard().getNewStream(Device(device), 0); }

void Synchronize(int device) { Timeline::Get().WaitOnHostForDevice(device); }

int64_t AllocatedBytes(int device) { return live_bytes[device]; }

bool FailEvent(int nth) {
  return uses_until_failure.exchange(nth < 0 ? kNoFailure : nth) == kHasFailed;
}

std::vector<std::string> TakeViolations() { return Timeline::Get().TakeViolations(); }

}  // namespace distgrad::fake_device

// libtorch looks the hooks up by the name that this macro makes a string of.
namespace at {
using HPUHooks = distgrad::fake_device::Hooks;
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, HPUHooks)
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(HPU, distgrad::fake_device::Guard)
}  // namespace c10::impl
