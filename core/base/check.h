// DG_CHECK(condition) << "what went wrong": ends the process with file, line and message.
//
// Only for what our own bug alone can cause. Whatever a peer, a user or the machine can cause
// is a Status.
#ifndef DISTGRAD_CORE_BASE_CHECK_H_
#define DISTGRAD_CORE_BASE_CHECK_H_

#include <sstream>

namespace distgrad::internal {

// Collects the message; its destructor prints and aborts.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Binds looser than << and tighter than ?:, and gives both arms of DG_CHECK the type void.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace distgrad::internal

#define DG_CHECK(condition)                            \
  __builtin_expect(static_cast<bool>(condition), true) \
      ? void()                                         \
      : ::distgrad::internal::Voidify() &              \
            ::distgrad::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

#endif  // DISTGRAD_CORE_BASE_CHECK_H_
