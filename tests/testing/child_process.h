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

#include <optional>
#include <string>
#include <vector>

namespace distgrad {

// A child process, for one thread. It dies with its parent, and with this object.
class ChildProcess {
 public:
  explicit ChildProcess(const std::vector<std::string>& arguments);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  // A line for its standard input. It may have ended.
  void WriteLine(const std::string& line);

  // The next line of its standard output, without the newline; "" at the end.
  std::string ReadLine();
  // Does the same, but does not wait: nullopt if no whole line is there yet.
  std::optional<std::string> TryReadLine();

  void Signal(int signal);

  // SIGSTOP, and waits until it has stopped. SIGCONT lets it go on.
  void Stop();

  // Waits for its end; its exit code, or minus the signal that killed it.
  int Wait();

 private:
  // Reads what there is; waits for it if `wait`. False at the end, and if there is nothing yet.
  bool ReadMore(bool wait);
  // The first line of read_, or all of it at the end.
  std::string TakeLine();

  pid_t pid_ = -1;  // -1 once it was waited for
  int input_ = -1;
  int output_ = -1;
  std::string read_;  // of its output, and not yet taken
  bool is_over_ = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_CHILD_PROCESS_H_
