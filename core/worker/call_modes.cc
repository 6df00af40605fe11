// Reads the modes of a thread, writes them into a call, and sets them for a handler.
#include "core/worker/call_modes.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>

namespace distgrad {
namespace {

constexpr uint8_t kGradEnabled = 1, kInference = 2, kAutocastCache = 4;

// 0 stands for none.
constexpr at::ScalarType kAutocastTypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

std::optional<at::ScalarType> AutocastType(at::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

void SetAutocast(at::DeviceType device, std::optional<at::ScalarType> type) {
  at::autocast::set_autocast_enabled(device, type.has_value());
  if (type.has_value()) at::autocast::set_autocast_dtype(device, *type);
}

uint8_t CodeOf(std::optional<at::ScalarType> type) {
  for (size_t i = 0; i < std::size(kAutocastTypes); ++i) {
    if (type == kAutocastTypes[i]) return static_cast<uint8_t>(i + 1);
  }
  return 0;
}

std::optional<at::ScalarType> TypeOf(uint8_t code) {
  if (code == 0 || code > std::size(kAutocastTypes)) return std::nullopt;
  return kAutocastTypes[code - 1];
}

}  // namespace

CallModes CallModes::Current() {
  return {.grad_enabled = at::GradMode::is_enabled(),
          .inference = c10::InferenceMode::is_enabled(),
          .autocast_cpu = AutocastType(at::kCPU),
          .autocast_cuda = AutocastType(at::kCUDA),
          .autocast_cache = at::autocast::is_autocast_cache_enabled()};
}

void AppendCallModes(const CallModes& modes, WireWriter& writer) {
  writer.U8(static_cast<uint8_t>((modes.grad_enabled ? kGradEnabled : 0) |
                                 (modes.inference ? kInference : 0) |
                                 (modes.autocast_cache ? kAutocastCache : 0)));
  writer.U8(CodeOf(modes.autocast_cpu));
  writer.U8(CodeOf(modes.autocast_cuda));
}

CallModes ReadCallModes(WireReader& reader) {
  const uint8_t flags = reader.U8();
  CallModes modes;
  modes.grad_enabled = flags & kGradEnabled;
  modes.inference = flags & kInference;
  modes.autocast_cache = flags & kAutocastCache;
  modes.autocast_cpu = TypeOf(reader.U8());
  modes.autocast_cuda = TypeOf(reader.U8());
  return modes;
}

CallModesScope::Autocast CallModesScope::Autocast::Of(at::DeviceType device) {
  return {device, at::autocast::is_autocast_enabled(device),
          at::autocast::get_autocast_dtype(device)};
}

void CallModesScope::Autocast::Set() const {
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, type);
}

CallModesScope::CallModesScope(const CallModes& modes)
    : grad_enabled_(at::GradMode::is_enabled()),
      autocast_cache_(at::autocast::is_autocast_cache_enabled()),
      autocast_cpu_(Autocast::Of(at::kCPU)),
      autocast_cuda_(Autocast::Of(at::kCUDA)),
      autocast_(modes.autocast_cpu.has_value() || modes.autocast_cuda.has_value()),
      inference_(modes.inference) {
  at::GradMode::set_enabled(modes.grad_enabled && !modes.inference);
  SetAutocast(at::kCPU, modes.autocast_cpu);
  SetAutocast(at::kCUDA, modes.autocast_cuda);
  if (!autocast_) return;
  at::autocast::set_autocast_cache_enabled(modes.autocast_cache);
  at::autocast::increment_nesting();
}

// All of it, also where the scope has changed nothing: what ran inside may have.
CallModesScope::~CallModesScope() {
  // What was cast inside is of no use to the next call on this thread.
  if (autocast_ && at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  autocast_cpu_.Set();
  autocast_cuda_.Set();
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  at::GradMode::set_enabled(grad_enabled_);
}

}  // namespace distgrad
