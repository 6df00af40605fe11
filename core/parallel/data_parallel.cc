// Scatters the batch, runs the replicas, and gathers their outputs.
#include "core/parallel/data_parallel.h"

#include <torch/nn/module.h>

#include <utility>

#include "core/parallel/new_device_collectives.h"
#include "core/tensor/exception.h"

namespace distgrad::internal {
namespace {

DataParallelOptions Complete(DataParallelOptions options) {
  options.devices = DevicesOrAllCuda(std::move(options.devices));
  options.output_device = Canonical(options.output_device.value_or(options.devices[0]));
  return options;
}

std::shared_ptr<torch::nn::Module> NotNull(std::shared_ptr<torch::nn::Module> module) {
  TORCH_CHECK_VALUE(module != nullptr, "data parallel: no module");
  return module;
}

// Says so at once if another call is in flight.
class Turn {
 public:
  explicit Turn(std::atomic<bool>* busy) : busy_(busy) {
    TORCH_CHECK(!busy_->exchange(true),
                "data parallel: a forward of this object is in flight, here or in another thread");
  }
  ~Turn() { *busy_ = false; }

 private:
  std::atomic<bool>* const busy_;
};

}  // namespace

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                   DataParallelOptions options_in)
    : options(Complete(std::move(options_in))),
      module_(NotNull(std::move(module))),
      replicas_(options.devices.size() == 1 && OnModuleItself(1)
                    ? nullptr
                    : std::make_unique<Replicas>(
                          module_,
                          ValueOrThrow(NewDeviceCollectives(options.devices, options.collectives)),
                          options.replicas)),
      threads_(options.devices) {}

bool DataParallelCore::OnModuleItself(size_t count) const {
  return count == 1 && HomeOf(*module_, options.devices[0]) == options.devices[0];
}

void DataParallelCore::Run(size_t count,
                           absl::FunctionRef<void(size_t, torch::nn::Module&)> forward) {
  TORCH_CHECK_VALUE(replicas_ != nullptr, "data parallel: the module was moved from ",
                    options.devices[0], ", the only device");
  const Turn turn(&busy_);
  replicas_->Refresh(count);
  threads_.Run(count, [&](size_t i) {
    replicas_->Install(i);
    forward(i, *replicas_->modules()[i]);
  });
  replicas_->Keep(count);
}

std::vector<std::shared_ptr<torch::nn::Module>> ReplicateModule(
    std::shared_ptr<torch::nn::Module> module, std::vector<c10::Device> devices) {
  devices = DevicesOrAllCuda(std::move(devices));
  const size_t count = devices.size();
  Replicas replicas(NotNull(std::move(module)),
                    ValueOrThrow(NewDeviceCollectives(std::move(devices))));
  replicas.Refresh(count);
  for (size_t i = 0; i < count; ++i) replicas.Install(i);
  return replicas.modules();
}

}  // namespace distgrad::internal
