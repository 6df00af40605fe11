// Sockets between simulated processes: TCP on the addresses of this machine, pairs, and eventfds,
// for what libc.cc brings here. All of them are non-blocking, and close() is the end of each.
//
// What one end sends arrives at the other in order, some time later. Connections break: the end
// that has opened one always hears of it soon, the other end perhaps never; and what was sent just
// before may have arrived or not. A process may be cut off for a while: then what it sends and what
// it is sent arrives when that is over, and nobody is told.
#ifndef DISTGRAD_TESTS_SIMULATION_SOCKETS_H_
#define DISTGRAD_TESTS_SIMULATION_SOCKETS_H_

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace distgrad::simulation {

struct SocketOptions {
  uint32_t break_one_in = 0;  // so many times that something is sent, or opened; 0: never
  // So many connections that are opened are refused, and so are all others for a while, less than
  // one second; 0: none.
  uint32_t refuse_one_in = 0;
  uint32_t slow_one_in = 0;   // so many arrive up to 50 ms later; 0: none
  uint32_t split_one_in = 0;  // so many reads and writes are of a part, as small as a byte; 0: none
};

// For the whole simulation. Without it all is quick and whole.
void SetSocketOptions(const SocketOptions& options);
// From then on no connection breaks.
void CalmSockets();
// Cuts off a process, or all of them, until then.
inline constexpr int kAllProcesses = INT32_MIN;
void CutOffSockets(int process, int64_t until);
// Ends all sockets of a process, and refuses it others. `silently`: as its machine's end does, of
// which nobody is told.
void KillSockets(int process, bool silently);
size_t OpenSockets();

// ------------------------------------------------------------------------------- For libc.cc

// Above those that the system gives.
inline constexpr int kFirstDescriptor = 1 << 24;
inline bool IsSimulated(int descriptor) { return descriptor >= kFirstDescriptor; }

// As libc's functions of these names, on a thread that takes part.
int NewSocket();
int NewSocketPair(int ends[2]);
int NewEvent();
int BindSocket(int descriptor, const sockaddr* address);
int ListenOn(int descriptor);
int ConnectSocket(int descriptor, const sockaddr* address);
int AcceptSocket(int descriptor);
ssize_t SendTo(int descriptor, const void* bytes, size_t size);
ssize_t ReceiveFrom(int descriptor, void* bytes, size_t size);
int ShutDown(int descriptor);
int CloseSocket(int descriptor);
int PollSockets(pollfd* entries, size_t count, int milliseconds);
int TakeSocketError(int descriptor);  // what SO_ERROR says
int NameOfSocket(int descriptor, sockaddr* address, socklen_t* size);
int NameOfPeer(int descriptor, sockaddr* address, socklen_t* size);

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_SOCKETS_H_
