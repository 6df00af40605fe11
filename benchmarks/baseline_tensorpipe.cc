// The TensorPipe baseline: one message there and back, on its own threads.
#include <tensorpipe/tensorpipe.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "benchmarks/baseline_side.h"

namespace distgrad {
namespace {

using tensorpipe::Error;

// The file in which the listening process leaves its address.
std::string AddressFile(const SideOptions& place) {
  const char* const folder = std::getenv("TMPDIR");
  return absl::StrCat(folder ? folder : "/tmp", "/distgrad-baseline-", place.port);
}

class TensorPipeSide : public BenchmarkSide {
 public:
  explicit TensorPipeSide(const SideOptions& place)
      : transport_(absl::StartsWith(place.config, "shm") ? "shm" : "uv"),
        as_tensor_(absl::EndsWith(place.config, "+cma")),
        context_(std::make_shared<tensorpipe::Context>()) {
    if (transport_ == "shm")
      context_->registerTransport(0, "shm", tensorpipe::transport::shm::create());
    else
      context_->registerTransport(0, "uv", tensorpipe::transport::uv::create());
    context_->registerChannel(0, "basic", tensorpipe::channel::basic::create());
    if (auto cma = tensorpipe::channel::cma::create(); as_tensor_ && cma->isViable())
      context_->registerChannel(1, "cma", std::move(cma));
  }
  ~TensorPipeSide() override { context_->join(); }

  void Listen(const std::string& file) {
    listener_ = context_->listen({transport_ == "shm" ? "shm://" : "uv://127.0.0.1"});
    listener_->accept([this](const Error& error, std::shared_ptr<tensorpipe::Pipe> pipe) {
      if (error) return;
      pipe_ = std::move(pipe);
      Echo();
    });
    std::ofstream(file + "~") << listener_->url(transport_);
    std::rename((file + "~").c_str(), file.c_str());
  }

  void Connect(const std::string& address) { pipe_ = context_->connect(address); }

  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    std::vector<char> out(work.bytes, 1);
    return Repeat(budget, [&]() -> absl::StatusOr<double> {
      absl::Notification there;
      bool good = false;
      const double start = MicrosNow();
      Send(out.data(), out.size());
      Receive([&](bool ok) {
        good = ok;
        there.Notify();
      });
      there.WaitForNotification();
      const double micros = MicrosNow() - start;
      if (!good || buffer_[out.size() - 1] != 1) return absl::InternalError("the echo is wrong");
      return micros;
    });
  }

 private:
  void Send(char* data, size_t size) {
    tensorpipe::Message message;
    if (as_tensor_) {
      tensorpipe::Message::Tensor tensor;
      tensor.buffer = tensorpipe::CpuBuffer{data};
      tensor.length = size;
      message.tensors.push_back(std::move(tensor));
    } else {
      message.payloads.push_back({data, size, ""});
    }
    pipe_->write(std::move(message), [](const Error&) {});
  }

  // Reads one message into buffer_.
  void Receive(std::function<void(bool)> done) {
    pipe_->readDescriptor([this, done](const Error& error, tensorpipe::Descriptor descriptor) {
      if (error) return done(false);
      size_ = as_tensor_ ? descriptor.tensors.at(0).length : descriptor.payloads.at(0).length;
      if (buffer_.size() < size_) buffer_.resize(size_);
      tensorpipe::Allocation allocation;
      if (as_tensor_) {
        allocation.tensors.emplace_back();
        allocation.tensors[0].buffer = tensorpipe::CpuBuffer{buffer_.data()};
      } else {
        allocation.payloads.push_back({buffer_.data()});
      }
      pipe_->read(std::move(allocation), [done](const Error& error) { done(!error); });
    });
  }

  void Echo() {
    Receive([this](bool ok) {
      if (!ok) return;
      Send(buffer_.data(), size_);
      Echo();
    });
  }

  const std::string transport_;
  const bool as_tensor_;
  const std::shared_ptr<tensorpipe::Context> context_;
  std::shared_ptr<tensorpipe::Listener> listener_;
  std::shared_ptr<tensorpipe::Pipe> pipe_;
  std::vector<char> buffer_;
  size_t size_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartTensorPipe(const SideOptions& place) {
  auto side = std::make_unique<TensorPipeSide>(place);
  const std::string file = AddressFile(place);
  if (place.rank == 1) {
    side->Listen(file);
    return side;
  }
  const double give_up = MicrosNow() + 20e6;
  std::string address;
  while (address.empty()) {
    if (MicrosNow() > give_up) return absl::DeadlineExceededError("nobody listens");
    usleep(1000);
    std::ifstream in(file);
    std::getline(in, address);
  }
  unlink(file.c_str());
  side->Connect(address);
  return side;
}

}  // namespace distgrad
