// A port for tests and benchmarks whose programs have to be told one.
#ifndef DISTGRAD_TESTS_TESTING_FREE_PORT_H_
#define DISTGRAD_TESTS_TESTING_FREE_PORT_H_

namespace distgrad {

// A TCP port of loopback that is free at this moment. Bazel's tests have a loopback each, so no
// other test takes it. Ends the process, with the reason, where there is none.
int FreePort();

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_FREE_PORT_H_
