// The state of what only goes on: from one value of an enum to a later one.
#ifndef DISTGRAD_CORE_BASE_MONOTONIC_STATE_H_
#define DISTGRAD_CORE_BASE_MONOTONIC_STATE_H_

namespace distgrad {

// Needs a lock of its owner's around it.
template <typename State>
class MonotonicState {
 public:
  explicit MonotonicState(State first) : state_(first) {}

  // Goes on to `to`, also past states between. False, and nothing changes, if it has come as far
  // already.
  bool Advance(State to) {
    if (state_ >= to) return false;
    state_ = to;
    return true;
  }
  operator State() const { return state_; }  // NOLINT: implicit

 private:
  State state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_MONOTONIC_STATE_H_
