// Keeps the ends of all connections, and what is on its way to each. Only the thread that has the
// baton is here, and it does not pass it on but where it waits.
#include "tests/simulation/sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {
namespace {

// Of what one end has sent, and the other has not read.
constexpr size_t kWindow = size_t{64} << 10;

// What arrives: bytes, or, where there are none, the end of what is sent (0) or an error.
struct Arrival {
  int64_t at;
  std::string bytes;
  int error = 0;
};

struct SocketEnd {
  explicit SocketEnd(int the_process) : process(the_process) {}

  const int process;
  uint16_t port = 0;
  bool listens = false;
  std::multimap<int64_t, std::shared_ptr<SocketEnd>> queue;  // by when each can be accepted

  bool is_event = false;
  uint64_t rings = 0;

  // One that connects: when it learns what has become of it.
  bool connects = false;
  bool has_opened = false;  // it was this end that connected
  int64_t connected_at = 0;
  int connect_error = 0;

  std::weak_ptr<SocketEnd> peer;  // null: closed
  bool is_local = false;          // of a pair: nothing goes by the network
  bool is_mute = false;           // what it sends goes nowhere, and it does not learn that
  std::deque<Arrival> in;
  int64_t last_arrival = 0;
  size_t unread = 0;  // bytes, those on their way too
  int error = 0;

  std::vector<const void*> pollers;  // what they wait for
};

struct Sockets {
  SocketOptions options;
  bool calm = false;
  int next = kFirstDescriptor;
  uint16_t next_port = 40000;
  std::map<int, std::shared_ptr<SocketEnd>> open;  // by descriptor
  std::map<uint16_t, std::weak_ptr<SocketEnd>> listeners;
  std::map<int, int64_t> cut_off_until;  // by process
  std::set<int> dead;
  int64_t refused_until = 0;
};

Sockets& All() {
  static auto* const all = new Sockets;
  return *all;
}

int Fail(int error) {
  errno = error;
  return -1;
}

// null, with errno, where there is none.
std::shared_ptr<SocketEnd> Find(int descriptor) {
  const auto found = All().open.find(descriptor);
  if (found != All().open.end()) return found->second;
  errno = EBADF;
  return nullptr;
}

int Open(std::shared_ptr<SocketEnd> end) {
  const int descriptor = All().next++;
  All().open.emplace(descriptor, std::move(end));
  return descriptor;
}

bool OneIn(uint32_t one_in) { return one_in != 0 && Draw() % one_in == 0; }

// Whether something on the way says that nobody listens. Not for so long, nor again so soon, that
// it has to be believed.
bool IsRefused() {
  constexpr int64_t kMost = 800000000, kPause = 500000000;
  Sockets& all = All();
  if (all.calm) return false;
  if (all.refused_until + kPause < Now() && OneIn(all.options.refuse_one_in)) {
    all.refused_until = Now() + static_cast<int64_t>(Draw() % kMost);
  }
  return Now() < all.refused_until;
}

int64_t CutOffUntil(const SocketEnd& end) {
  int64_t until = 0;
  for (const int process : {kAllProcesses, end.process}) {
    const auto found = All().cut_off_until.find(process);
    if (found != All().cut_off_until.end()) until = std::max(until, found->second);
  }
  return until;
}

// When something that is sent now between two ends arrives.
int64_t ArrivalTime(const SocketEnd& one, const SocketEnd& other) {
  int64_t at = Now() + 20000 + static_cast<int64_t>(Draw() % 150000);
  if (!All().calm && OneIn(All().options.slow_one_in))
    at += static_cast<int64_t>(Draw() % 50000000);
  const int64_t cut_off_until = std::max(CutOffUntil(one), CutOffUntil(other));
  // Then it is sent once more.
  if (cut_off_until > Now()) at = cut_off_until + static_cast<int64_t>(Draw() % 200000000);
  return at;
}

// Has whoever polls this end look again at that time.
void Tell(const SocketEnd& end, int64_t at) {
  for (const void* poller : end.pollers) WakeAt(Wait::kPoll, poller, at);
}

void Deliver(const SocketEnd& from, SocketEnd& to, std::string bytes, int error) {
  int64_t at = from.is_local ? Now() : ArrivalTime(from, to);
  at = to.last_arrival = std::max(at, to.last_arrival);
  to.unread += bytes.size();
  to.in.push_back({at, std::move(bytes), error});
  Tell(to, at);
}

// What is on its way to an end whose connection breaks is lost, and it learns of the break.
void Break(const SocketEnd& from, SocketEnd& to) {
  while (!to.in.empty() && to.in.back().at > Now()) {
    to.unread -= to.in.back().bytes.size();
    to.in.pop_back();
  }
  to.last_arrival = Now();
  Deliver(from, to, "", ECONNRESET);
}

// An end is gone, whose peer is told, or not.
void Leave(SocketEnd& end, bool silently, bool resets) {
  const std::shared_ptr<SocketEnd> peer = end.peer.lock();
  end.peer.reset();
  if (peer == nullptr) return;
  if (silently) {
    peer->is_mute = true;
  } else {
    Deliver(end, *peer, "", resets ? ECONNRESET : 0);
  }
  Tell(*peer, Now());
}

bool HasRoom(const SocketEnd& end) {
  const std::shared_ptr<SocketEnd> peer = end.peer.lock();
  return peer == nullptr || end.is_mute || peer->unread < kWindow;
}

short EventsOf(const SocketEnd& end) {
  const int64_t now = Now();
  if (end.is_event) return static_cast<short>(end.rings > 0 ? POLLIN : 0);
  if (end.listens) {
    return static_cast<short>(!end.queue.empty() && end.queue.begin()->first <= now ? POLLIN : 0);
  }
  if (end.connects) {
    if (end.connected_at > now) return 0;
    return static_cast<short>(POLLOUT | (end.connect_error != 0 ? POLLERR : 0));
  }
  if (end.error != 0) return POLLIN | POLLOUT | POLLERR | POLLHUP;
  const bool reads = !end.in.empty() && end.in.front().at <= now;
  return static_cast<short>((reads ? POLLIN : 0) | (HasRoom(end) ? POLLOUT : 0));
}

// When an end may have another event without anybody's doing.
int64_t NextEventOf(const SocketEnd& end) {
  int64_t next = kNever;
  if (end.listens && !end.queue.empty()) next = end.queue.begin()->first;
  if (end.connects) next = end.connected_at;
  if (!end.in.empty()) next = std::min(next, end.in.front().at);
  return next > Now() ? next : kNever;
}

uint16_t PortOf(const sockaddr* address) {
  return ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
}

int NameIt(uint16_t port, sockaddr* address, socklen_t* size) {
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::memcpy(address, &name, std::min<size_t>(*size, sizeof(name)));
  *size = sizeof(name);
  return 0;
}

}  // namespace

void SetSocketOptions(const SocketOptions& options) { All().options = options; }

void CalmSockets() { All().calm = true; }

void CutOffSockets(int process, int64_t until) {
  int64_t& known = All().cut_off_until[process];
  known = std::max(known, until);
}

void KillSockets(int process, bool silently) {
  All().dead.insert(process);
  for (const auto& [descriptor, end] : All().open) {
    if (end->process != process) continue;
    Leave(*end, silently, /*resets=*/true);
    end->error = ECONNRESET;
    end->connects = false;
    Tell(*end, Now());
  }
}

size_t OpenSockets() { return All().open.size(); }

int NewSocket() { return Open(std::make_shared<SocketEnd>(CurrentProcess())); }

int NewSocketPair(int ends[2]) {
  const auto one = std::make_shared<SocketEnd>(CurrentProcess());
  const auto other = std::make_shared<SocketEnd>(CurrentProcess());
  one->peer = other;
  other->peer = one;
  one->is_local = other->is_local = true;
  ends[0] = Open(one);
  ends[1] = Open(other);
  return 0;
}

int NewEvent() {
  auto end = std::make_shared<SocketEnd>(CurrentProcess());
  end->is_event = true;
  return Open(std::move(end));
}

int BindSocket(int descriptor, const sockaddr* address) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  uint16_t port = PortOf(address);
  if (port == 0) port = All().next_port++;
  if (All().listeners[port].lock() != nullptr) return Fail(EADDRINUSE);
  end->port = port;
  return 0;
}

int ListenOn(int descriptor) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  end->listens = true;
  All().listeners[end->port] = end;
  return 0;
}

int ConnectSocket(int descriptor, const sockaddr* address) {
  MaybeYield();
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  const auto found = All().listeners.find(PortOf(address));
  const std::shared_ptr<SocketEnd> listener =
      found == All().listeners.end() ? nullptr : found->second.lock();
  end->connects = end->has_opened = true;
  end->port = All().next_port++;
  if (listener == nullptr || All().dead.count(end->process) > 0 || IsRefused()) {
    end->connected_at = ArrivalTime(*end, *end);
    end->connect_error = ECONNREFUSED;
    return Fail(EINPROGRESS);
  }
  end->connected_at = ArrivalTime(*end, *listener);
  if (!All().calm && OneIn(All().options.break_one_in)) {
    constexpr int kErrors[] = {ECONNREFUSED, ECONNRESET, EHOSTUNREACH};
    end->connect_error = kErrors[Draw() % std::size(kErrors)];
    return Fail(EINPROGRESS);
  }
  auto accepted = std::make_shared<SocketEnd>(listener->process);
  accepted->port = listener->port;
  accepted->peer = end;
  end->peer = accepted;
  listener->queue.emplace(end->connected_at, std::move(accepted));
  Tell(*listener, end->connected_at);
  return Fail(EINPROGRESS);
}

int AcceptSocket(int descriptor) {
  MaybeYield();
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  if (end->queue.empty() || end->queue.begin()->first > Now()) return Fail(EAGAIN);
  std::shared_ptr<SocketEnd> accepted = std::move(end->queue.begin()->second);
  end->queue.erase(end->queue.begin());
  return Open(std::move(accepted));
}

ssize_t SendTo(int descriptor, const void* bytes, size_t size) {
  MaybeYield();
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  if (end->is_event) {
    uint64_t rings;
    std::memcpy(&rings, bytes, sizeof(rings));
    end->rings += rings;
    Tell(*end, Now());
    return sizeof(rings);
  }
  if (end->error != 0) return Fail(EPIPE);
  if (!HasRoom(*end)) return Fail(EAGAIN);
  const std::shared_ptr<SocketEnd> peer = end->peer.lock();
  if (size > 1 && OneIn(All().options.split_one_in)) size = 1 + Draw() % (size - 1);
  if (end->is_mute) return static_cast<ssize_t>(size);
  if (peer == nullptr) {
    // The other machine says that it knows of no such connection.
    Deliver(*end, *end, "", ECONNRESET);
    return static_cast<ssize_t>(size);
  }
  size = std::min(size, kWindow - peer->unread);
  const bool breaks = !end->is_local && !All().calm && OneIn(All().options.break_one_in);
  const bool is_lost = breaks && Draw() % 2 == 0;
  if (!is_lost) Deliver(*end, *peer, std::string(static_cast<const char*>(bytes), size), 0);
  if (breaks) {
    const bool is_half = Draw() % 2 == 0;
    for (const std::shared_ptr<SocketEnd>& each : {end, peer}) {
      const std::shared_ptr<SocketEnd>& other = each == end ? peer : end;
      if (each->has_opened || !is_half) {
        // What has been sent before arrives where it says that it was not lost.
        if (each == peer && !is_lost) {
          Deliver(*other, *each, "", ECONNRESET);
        } else {
          Break(*other, *each);
        }
      }
      each->is_mute = true;
    }
  }
  return static_cast<ssize_t>(size);
}

ssize_t ReceiveFrom(int descriptor, void* bytes, size_t size) {
  MaybeYield();
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  if (end->is_event) {
    if (end->rings == 0) return Fail(EAGAIN);
    const uint64_t rings = std::exchange(end->rings, 0);
    std::memcpy(bytes, &rings, sizeof(rings));
    return sizeof(rings);
  }
  if (end->error != 0) return Fail(end->error);
  if (end->in.empty() || end->in.front().at > Now()) return Fail(EAGAIN);
  Arrival& first = end->in.front();
  if (first.error != 0) {
    end->error = first.error;
    return Fail(end->error);
  }
  if (first.bytes.empty()) return 0;
  size = std::min(size, first.bytes.size());
  if (size > 1 && OneIn(All().options.split_one_in)) size = 1 + Draw() % (size - 1);
  std::memcpy(bytes, first.bytes.data(), size);
  first.bytes.erase(0, size);
  if (first.bytes.empty()) end->in.pop_front();
  end->unread -= size;
  if (const std::shared_ptr<SocketEnd> peer = end->peer.lock()) Tell(*peer, Now());
  return static_cast<ssize_t>(size);
}

int ShutDown(int descriptor) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  Leave(*end, /*silently=*/false, /*resets=*/false);
  end->in.clear();
  end->unread = 0;
  end->in.push_back({Now(), "", 0});
  Tell(*end, Now());
  return 0;
}

int CloseSocket(int descriptor) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  All().open.erase(descriptor);
  Leave(*end, /*silently=*/end->is_mute, /*resets=*/end->unread > 0);
  // Nobody accepts those that wait.
  for (const auto& [at, waiting] : end->queue) {
    Leave(*waiting, /*silently=*/false, /*resets=*/true);
  }
  return 0;
}

int PollSockets(pollfd* entries, size_t count, int milliseconds) {
  MaybeYield();
  const int64_t deadline =
      milliseconds < 0 ? kNever : Now() + int64_t{milliseconds} * int64_t{1000000};
  std::vector<std::shared_ptr<SocketEnd>> ends(count);
  for (size_t i = 0; i < count; ++i) {
    if (entries[i].fd >= 0) ends[i] = Find(entries[i].fd);
  }
  for (;;) {
    int ready = 0;
    int64_t until = deadline;
    for (size_t i = 0; i < count; ++i) {
      entries[i].revents = 0;
      if (entries[i].fd < 0) continue;
      if (ends[i] == nullptr) {
        entries[i].revents = POLLNVAL;
      } else {
        entries[i].revents =
            static_cast<short>(EventsOf(*ends[i]) & (entries[i].events | POLLERR | POLLHUP));
        until = std::min(until, NextEventOf(*ends[i]));
      }
      if (entries[i].revents != 0) ++ready;
    }
    if (ready > 0 || deadline <= Now()) {
      // Whoever looks again and again sees time pass.
      if (ready == 0) Yield();
      return ready;
    }
    for (const auto& end : ends) {
      if (end != nullptr) end->pollers.push_back(&entries);
    }
    Block(Wait::kPoll, &entries, until);
    for (const auto& end : ends) {
      if (end == nullptr) continue;
      auto& pollers = end->pollers;
      pollers.erase(std::find(pollers.begin(), pollers.end(), &entries));
    }
  }
}

int TakeSocketError(int descriptor) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return EBADF;
  if (!end->connects || end->connected_at > Now()) return end->error;
  end->connects = false;
  end->error = end->connect_error;
  return end->error;
}

int NameOfSocket(int descriptor, sockaddr* address, socklen_t* size) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  return end == nullptr ? -1 : NameIt(end->port, address, size);
}

int NameOfPeer(int descriptor, sockaddr* address, socklen_t* size) {
  const std::shared_ptr<SocketEnd> end = Find(descriptor);
  if (end == nullptr) return -1;
  const std::shared_ptr<SocketEnd> peer = end->peer.lock();
  return peer == nullptr ? Fail(ENOTCONN) : NameIt(peer->port, address, size);
}

}  // namespace distgrad::simulation
