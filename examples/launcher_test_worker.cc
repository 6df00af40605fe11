// The program that launcher_test starts. Its first argument says what to do:
//
//   env FILE           adds its job variables to FILE
//   exit S0 S1 ...     exits with the status of its rank
//   listen             rank 0 listens at the job's port, as c10d's TCPStore would
//   fail S             rank 1 exits with S, others wait for a signal
//   crash              rank 1 aborts, others wait for a signal
//   wait FIFO          writes a byte to FIFO and waits for a signal
//   stubborn FIFO      as wait, with a child, and both ignore SIGINT and SIGTERM
//   launch FIFO        launches two that wait
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "examples/launcher.h"

namespace {

// When it is closed, the reader knows that this process, and those that it forked, have ended.
void SayReady(const char* fifo) {
  const int fd = open(fifo, O_WRONLY);
  if (fd < 0 || write(fd, "r", 1) != 1) _exit(99);
}

// Returns 0, or the error.
int Listen(int port) {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  const int on = 1;
  const int off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  address.sin6_port = htons(static_cast<uint16_t>(port));
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return errno;
  return listen(fd, 1) == 0 ? 0 : errno;
}

[[noreturn]] void WaitForEver() {
  while (true) pause();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argv[1];
  const char* rank_text = getenv("RANK");
  const int rank = rank_text == nullptr ? -1 : atoi(rank_text);
  if (what == "env") {
    std::FILE* file = std::fopen(argv[2], "a");
    const distgrad::JobPlace place =
        distgrad::JobPlaceFromEnvironment().value().value_or(distgrad::JobPlace{});
    const char* name = getenv("DISTGRAD_NAME");
    std::fprintf(file, "%d/%d local %s/%s at %s:%s threads %s spins %s called '%s'\n", place.rank,
                 place.world_size, getenv("LOCAL_RANK"), getenv("LOCAL_WORLD_SIZE"),
                 getenv("MASTER_ADDR"), getenv("MASTER_PORT"), getenv("OMP_NUM_THREADS"),
                 getenv("GOMP_SPINCOUNT"), name == nullptr ? "" : name);
    return std::fclose(file);
  }
  if (what == "exit") return atoi(argv[2 + rank]);
  if (what == "listen") return rank == 0 ? Listen(atoi(getenv("MASTER_PORT"))) : 0;
  if (what == "fail" || what == "crash") {
    if (rank == 1 && what == "fail") return atoi(argv[2]);
    if (rank == 1) abort();
    WaitForEver();
  }
  if (what == "launch") {
    distgrad::LaunchOptions options;
    options.arguments = {argv[0], "wait", argv[2]};
    return distgrad::Launch(options).value_or(98);
  }
  if (what == "stubborn") {
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    if (fork() == 0) WaitForEver();
  }
  SayReady(argv[2]);
  WaitForEver();
}
