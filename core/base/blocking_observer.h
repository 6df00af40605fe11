// Tells code that calls others on its thread whether these are about to wait.
#ifndef DISTGRAD_CORE_BASE_BLOCKING_OBSERVER_H_
#define DISTGRAD_CORE_BASE_BLOCKING_OBSERVER_H_

namespace distgrad {

// Hears, as long as it lives, of each BlockingScope that begins on its thread, unless a later
// observer lives there. Stays on its thread.
class BlockingObserver {
 public:
  BlockingObserver();
  BlockingObserver(const BlockingObserver&) = delete;
  BlockingObserver& operator=(const BlockingObserver&) = delete;

  // Called before the thread waits, under whatever locks it has: must not wait, but for
  // memory, nor throw.
  virtual void OnBlocking() = 0;

 protected:
  ~BlockingObserver();

 private:
  BlockingObserver* const outer_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_BLOCKING_OBSERVER_H_
