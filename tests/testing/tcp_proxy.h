// A proxy between the two ends of TCP connections, which sees what they send and may change it.
#ifndef DISTGRAD_TESTS_TESTING_TCP_PROXY_H_
#define DISTGRAD_TESTS_TESTING_TCP_PROXY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <thread>

#include "core/net/socket.h"

namespace distgrad {

class TcpProxy {
 public:
  enum class Way { kToServer, kToClient };
  // Returns what goes on in place of `bytes`. Called on the proxy's thread.
  using Edit = std::function<std::string(Way way, std::string bytes)>;

  // Listens on loopback, and forwards to that port there.
  TcpProxy(uint16_t server_port, Edit edit);
  ~TcpProxy();
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  // Gives each of the first two connections the other's server, before it forwards anything more.
  void ExchangeServers() { exchange_ = true; }

  uint16_t port() const { return listener_.LocalPort().value(); }

 private:
  struct Connection {
    Socket client, server;
  };

  void Run();
  void Accept();
  // Returns false if one end is gone, and the other shall go too.
  bool Forward(Way way, Socket& from, Socket& to);

  const uint16_t server_port_;
  const Edit edit_;
  std::atomic<bool> exchange_{false};
  Socket listener_;
  std::list<Connection> connections_;  // on thread_ only
  std::thread thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_TCP_PROXY_H_
