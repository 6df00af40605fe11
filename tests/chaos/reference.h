// The training of the chaos in this process alone, without faults.
#ifndef DISTGRAD_TESTS_CHAOS_REFERENCE_H_
#define DISTGRAD_TESTS_CHAOS_REFERENCE_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace distgrad {

// For one thread.
class ChaosReference {
 public:
  explicit ChaosReference(int workers);
  ~ChaosReference();

  // Trains until so many steps are done, if they are not yet.
  void TrainTo(int64_t steps);
  int64_t steps() const { return static_cast<int64_t>(losses_.size()); }
  // Of a step that is done; the first is 0.
  uint32_t LossBits(int64_t step) const { return losses_.at(step); }
  // Of each worker's layer as it stands.
  std::vector<uint32_t> Checksums() const;

 private:
  struct Model;

  const std::unique_ptr<Model> model_;
  std::vector<uint32_t> losses_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_REFERENCE_H_
