// Gloo is inside libtorch_cpu, and its headers are not in the wheel. c10d's ProcessGroupGloo.hpp
// names some of its classes, by pointers alone: so its own layout does not depend on theirs, and
// it compiles with the declarations in this folder, which are ours. Nothing of them may be used.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

}  // namespace gloo
