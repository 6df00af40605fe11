// The rest of what is planted in planted_tidy.h, in a source.
#include "tools/planted_tidy.h"

namespace distgrad {

void PlantedTidy::AddOnce() {
  AddLocked();  // finds clang-diagnostic-thread-safety-analysis
}

void PlantedTidy::AddTwice() {
  absl::MutexLock lock(&mu_);
  AddLocked();
  AddLocked();
}

void PlantedTidy::KeepLocked() {
  mu_.Lock();
  AddLocked();
}  // finds clang-diagnostic-thread-safety-analysis

void PlantedTidy::WaitWithoutLock() {
  steady_changed_.Wait(&steady_mu_);  // finds clang-diagnostic-thread-safety-analysis
  SteadyMutexLock lock(&steady_mu_);
  ++steady_;
}

float Half(int number) {
  return number / 2;  // finds bugprone-integer-division
}

int* Nothing() {
  return 0;  // finds modernize-use-nullptr
}

}  // namespace distgrad
