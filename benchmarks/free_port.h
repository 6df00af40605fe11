// A port for the stores of groups of processes.
#ifndef DISTGRAD_BENCHMARKS_FREE_PORT_H_
#define DISTGRAD_BENCHMARKS_FREE_PORT_H_

namespace distgrad {

// A TCP port of loopback that is free at this moment.
int FreePort();

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_FREE_PORT_H_
