// A second process for tests: the running test binary again, with other arguments.
//
//   int main(int argc, char** argv) {
//     if (argc > 1 && argv[1] == std::string("--child")) return RunChild(argv[2]);
//     testing::InitGoogleTest(&argc, argv);
//     return RUN_ALL_TESTS();
//   }
#ifndef DISTGRAD_TESTS_TESTING_CHILD_PROCESS_H_
#define DISTGRAD_TESTS_TESTING_CHILD_PROCESS_H_

#include <sys/types.h>

#include <cstdio>
#include <string>
#include <vector>

namespace distgrad {

// For one thread. The child dies with its parent, and with this object.
class ChildProcess {
 public:
  explicit ChildProcess(const std::vector<std::string>& arguments);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  // The next line of its standard output, without the newline; "" at the end.
  std::string ReadLine();

  void Signal(int signal);

  // SIGSTOP, and waits until it has stopped. SIGCONT lets it go on.
  void Stop();

  // Waits for its end; its exit code, or minus the signal that killed it.
  int Wait();

 private:
  pid_t pid_ = -1;  // -1 once it was waited for
  FILE* output_ = nullptr;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_CHILD_PROCESS_H_
