// Has nothing to keep apart: builds without CUDA capture no graphs.
#include "core/tensor/graph_capture.h"

namespace distgrad {

void OutsideOfCaptures(c10::Device /*device*/, absl::FunctionRef<void()> run) { run(); }

bool IsCaptured(c10::Stream /*stream*/) { return false; }

}  // namespace distgrad
