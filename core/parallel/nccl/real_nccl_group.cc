// Calls NCCL without blocking, and puts its errors into a Status.
#include "core/parallel/nccl/real_nccl_group.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/graph_capture.h"

namespace distgrad {
namespace {

class RealNcclGroup final : public NcclGroup {
 public:
  RealNcclGroup(std::vector<c10::Device> devices, const NcclFunctions& functions)
      : devices_(std::move(devices)), nccl_(functions), communicators_(devices_.size(), nullptr) {}
  // Abort is NCCL's way to end a communicator whatever its state is; the collectives have waited
  // for what was still of use.
  ~RealNcclGroup() override { Abort(); }

  absl::Status Start() {
    const int count = nccl_.device_count();
    for (const c10::Device device : devices_) {
      if (device.index() < count) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "NCCL: there is no ", device.str(), ": CUDA finds ", count, " GPUs on this machine"));
    }
    ncclUniqueId id;
    DG_RETURN_IF_ERROR(Check(nccl_.get_unique_id(&id), "ncclGetUniqueId", 0));
    DG_RETURN_IF_ERROR(NcclDoesNotBlock());  // NCCL has read its file by now
    return Grouped("ncclCommInitRankConfig", [&](size_t i) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      return nccl_.init_rank(&communicators_[i], static_cast<int>(devices_.size()), id,
                             static_cast<int>(i), &config);
    });
  }

  absl::StatusOr<bool> Ready() override {
    bool ready = true;
    for (size_t i = 0; i < devices_.size(); ++i) {
      ncclResult_t state = ncclSuccess;
      DG_RETURN_IF_ERROR(
          Check(nccl_.get_async_error(communicators_[i], &state), "ncclCommGetAsyncError", i));
      DG_RETURN_IF_ERROR(Check(state, "communicator", i));
      if (state == ncclInProgress) ready = false;
    }
    return ready;
  }

  absl::Status Reduce(absl::Span<const Part> parts, size_t count, size_t root) override {
    return Grouped("ncclReduce", [&](size_t i) {
      const at::Tensor& send = parts[i].send;
      return nccl_.reduce(send.const_data_ptr(), Memory(parts[i].receive), count,
                          NcclDataType(send.scalar_type()), ncclSum, static_cast<int>(root),
                          communicators_[i], nccl_.stream(parts[i].stream));
    });
  }

  absl::Status Broadcast(absl::Span<const Part> parts, size_t count, size_t root) override {
    return Grouped("ncclBroadcast", [&](size_t i) {
      const at::Tensor& send = parts[i].send;
      return nccl_.broadcast(send.const_data_ptr(), Memory(parts[i].receive),
                             count * send.itemsize(), ncclUint8, static_cast<int>(root),
                             communicators_[i], nccl_.stream(parts[i].stream));
    });
  }

  void Abort() override {
    for (size_t i = 0; i < devices_.size(); ++i) {
      if (communicators_[i] == nullptr) continue;
      AbortOnDevice(i);
      // Set to null after it: a thread of NCCL's that sets it up may write it until then.
      communicators_[i] = nullptr;
    }
  }

 private:
  // Not mutable_data_ptr(): of a root it may be a tensor that is only read.
  static void* Memory(const at::Tensor& tensor) {
    return const_cast<void*>(tensor.const_data_ptr());
  }

  absl::Status Check(ncclResult_t result, const char* what, size_t i) const {
    if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
    const char* const details = nccl_.last_error(communicators_[i]);
    std::string message =
        absl::StrCat(what, " of ", devices_[i].str(), ": ", nccl_.error_string(result));
    if (details != nullptr && *details != '\0') absl::StrAppend(&message, " (", details, ")");
    return absl::InternalError(message);
  }

  // One call for each device, on it, which NCCL begins together.
  template <typename Call>
  absl::Status Grouped(const char* what, Call call) {
    DG_RETURN_IF_ERROR(Check(nccl_.group_start(), "ncclGroupStart", 0));
    absl::Status status;
    for (size_t i = 0; i < devices_.size() && status.ok(); ++i) status = OnDevice(i, what, call);
    // Also after an error: a group that stays open takes in what other code calls.
    status.Update(Check(nccl_.group_end(), "ncclGroupEnd", 0));
    return status;
  }

  // CUDA's errors are exceptions here: of a device that is full, or that another program has for
  // itself, say.
  template <typename Call>
  absl::Status OnDevice(size_t i, const char* what, Call call) {
    std::optional<int> before;
    absl::Status status;
    try {
      before = nccl_.exchange_device(devices_[i].index());
      status = Check(call(i), what, i);
    } catch (...) {
      status = Thrown(what, i);
    }
    try {
      if (before.has_value()) nccl_.restore_device(*before);
    } catch (...) {
      status.Update(Thrown(what, i));
    }
    return status;
  }

  // On the device, for in the end NCCL makes the one current again that was it before, and so a
  // context on it. An error of CUDA hinders no abort: NCCL does without.
  void AbortOnDevice(size_t i) {
    std::optional<int> before;
    try {
      before = nccl_.exchange_device(devices_[i].index());
    } catch (...) {
      DG_LOG(WARNING) << "NCCL: " << Thrown("ncclCommAbort", i);
    }
    nccl_.abort(communicators_[i]);  // what it answers changes nothing: it is gone either way
    try {
      if (before.has_value()) nccl_.restore_device(*before);
    } catch (...) {
      DG_LOG(WARNING) << "NCCL: " << Thrown("ncclCommAbort", i);
    }
  }

  // Of the exception that is being handled.
  absl::Status Thrown(const char* what, size_t i) const {
    return Annotate(StatusFromException(std::current_exception()),
                    absl::StrCat(what, " of ", devices_[i].str()));
  }

  // Constant after construction.
  const std::vector<c10::Device> devices_;
  const NcclFunctions nccl_;
  std::vector<ncclComm_t> communicators_;  // null where there is none
};

}  // namespace

ncclDataType_t NcclDataType(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return ncclFloat32;
    case c10::ScalarType::Double:
      return ncclFloat64;
    case c10::ScalarType::Half:
      return ncclFloat16;
    case c10::ScalarType::BFloat16:
      return ncclBfloat16;
    case c10::ScalarType::Byte:
      return ncclUint8;
    case c10::ScalarType::Char:
      return ncclInt8;
    case c10::ScalarType::Int:
      return ncclInt32;
    default:
      DG_CHECK(dtype == c10::ScalarType::Long) << "see NcclAdds";
      return ncclInt64;
  }
}

absl::Status NcclDoesNotBlock() {
  const char* const value = std::getenv("NCCL_COMM_BLOCKING");
  // As NCCL reads numbers.
  if (value == nullptr || std::strtoll(value, nullptr, 0) != 1) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "NCCL: the variable NCCL_COMM_BLOCKING is '", value,
      "', by the environment or NCCL's file of variables (nccl.conf): calls would wait "
      "in NCCL without a deadline; remove it"));
}

NcclFunctions NcclFunctions::Real() {
  NcclFunctions functions;
  functions.device_count = [] { return static_cast<int>(c10::cuda::device_count()); };
  functions.exchange_device = [](int device) {
    return static_cast<int>(c10::cuda::ExchangeDevice(static_cast<c10::DeviceIndex>(device)));
  };
  // Makes no context on a device that the program has not used.
  functions.restore_device = [](int device) {
    c10::cuda::MaybeExchangeDevice(static_cast<c10::DeviceIndex>(device));
  };
  functions.stream = [](c10::Stream stream) { return c10::cuda::CUDAStream(stream).stream(); };
  return functions;
}

absl::StatusOr<std::unique_ptr<NcclGroup>> StartNcclGroup(const std::vector<c10::Device>& devices,
                                                          const NcclFunctions& functions) {
  auto group = std::make_unique<RealNcclGroup>(devices, functions);
  DG_RETURN_IF_ERROR(group->Start());
  return group;
}

NcclPlatform RealNcclPlatform() {
  NcclPlatform platform;
  platform.start = [](const std::vector<c10::Device>& devices) { return StartNcclGroup(devices); };
  platform.is_capturing = IsCaptured;
  platform.query = [](const c10::Event& event) {
    if (!event.was_marked_for_recording()) return true;
    bool ended = false;
    OutsideOfCaptures(event.device(), [&] { ended = event.query(); });
    return ended;
  };
  return platform;
}

}  // namespace distgrad
