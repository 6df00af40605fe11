// Tells the owner of the work that the calling thread does that the thread is about to wait.
#ifndef DISTGRAD_CORE_BASE_BLOCKING_H_
#define DISTGRAD_CORE_BASE_BLOCKING_H_

namespace distgrad {

// An owner of threads that should not all wait: another one takes the place of one that does.
class Blockable {
 public:
  // Called on the thread that is about to wait, and when it goes on.
  virtual void OnBlocked() = 0;
  virtual void OnUnblocked() = 0;

  // Sets the owner of the work that the calling thread does now; null for none.
  static void SetCurrent(Blockable* blockable);

 protected:
  ~Blockable() = default;
};

// Stands around whatever waits. Does nothing on a thread that nothing needs back. Nests.
class BlockingScope {
 public:
  BlockingScope();
  ~BlockingScope();
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;

 private:
  Blockable* const blockable_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_BLOCKING_H_
