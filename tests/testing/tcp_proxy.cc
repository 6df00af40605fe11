// Forwards with poll(), on one thread.
#include "tests/testing/tcp_proxy.h"

#include <poll.h>
#include <sys/socket.h>

#include <iterator>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/deadline.h"

namespace distgrad {
namespace {

// Only a hang takes so long.
Deadline Later() { return Deadline::After(absl::Minutes(2)); }

}  // namespace

TcpProxy::TcpProxy(uint16_t server_port, Edit edit)
    : server_port_(server_port),
      edit_(std::move(edit)),
      listener_(Socket::Listen("127.0.0.1", 0).value()),
      thread_([this] { Run(); }) {}

TcpProxy::~TcpProxy() {
  shutdown(listener_.fd(), SHUT_RDWR);
  thread_.join();
}

void TcpProxy::Run() {
  for (;;) {
    std::vector<pollfd> entries = {{listener_.fd(), POLLIN, 0}};
    for (const Connection& connection : connections_) {
      entries.push_back({connection.client.fd(), POLLIN, 0});
      entries.push_back({connection.server.fd(), POLLIN, 0});
    }
    if (poll(entries.data(), entries.size(), -1) < 0) continue;
    if ((entries[0].revents & (POLLHUP | POLLERR)) != 0) return;
    if (exchange_.exchange(false)) {
      std::swap(connections_.front().server, std::next(connections_.begin())->server);
      continue;  // who has sent what is asked anew
    }
    size_t at = 1;
    for (auto it = connections_.begin(); it != connections_.end(); at += 2) {
      const bool stays =
          (entries[at].revents == 0 || Forward(Way::kToServer, it->client, it->server)) &&
          (entries[at + 1].revents == 0 || Forward(Way::kToClient, it->server, it->client));
      it = stays ? std::next(it) : connections_.erase(it);
    }
    if (entries[0].revents != 0) Accept();
  }
}

void TcpProxy::Accept() {
  Socket client(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client.valid()) return;
  auto server = Socket::Connect("127.0.0.1", server_port_, Later());
  if (server.ok()) connections_.push_back({std::move(client), *std::move(server)});
}

bool TcpProxy::Forward(Way way, Socket& from, Socket& to) {
  char bytes[4096];
  const ssize_t n = recv(from.fd(), bytes, sizeof(bytes), 0);
  if (n <= 0) return false;
  return to.Send(edit_(way, std::string(bytes, static_cast<size_t>(n))), Later()).ok();
}

}  // namespace distgrad
