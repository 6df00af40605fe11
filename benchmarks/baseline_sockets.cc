// The socket baseline: one blocking write and blocking reads.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/baseline_side.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

absl::Status Failed(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

struct Address {
  sockaddr_storage storage = {};
  socklen_t size = 0;
  int family = 0;
};

// An abstract Unix-domain name, or loopback.
Address AddressOf(const SideOptions& place) {
  Address address;
  if (place.config == "unix") {
    auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
    const std::string name = absl::StrCat("distgrad-baseline-", place.port);
    std::memcpy(un->sun_path + 1, name.data(), name.size());
    address.size = offsetof(sockaddr_un, sun_path) + 1 + name.size();
    address.family = un->sun_family = AF_UNIX;
  } else {
    auto* in = reinterpret_cast<sockaddr_in*>(&address.storage);
    in->sin_port = htons(static_cast<uint16_t>(place.port));
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.size = sizeof(sockaddr_in);
    address.family = in->sin_family = AF_INET;
  }
  return address;
}

bool WriteAll(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
    if (n <= 0) return false;
    data += n;
    size -= n;
  }
  return true;
}
bool ReadAll(int fd, char* data, size_t size) {
  while (size > 0) {
    const ssize_t n = read(fd, data, size);
    if (n <= 0) return false;
    data += n;
    size -= n;
  }
  return true;
}

// A message is its size and as many bytes.
class SocketSide : public BenchmarkSide {
 public:
  SocketSide(int fd, bool echoes) : fd_(fd) {
    if (echoes) thread_ = std::thread([this] { Echo(); });
  }
  ~SocketSide() override {
    shutdown(fd_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    close(fd_);
  }

  absl::StatusOr<Sample> Run(const Work& work, absl::Duration budget) override {
    std::vector<char> out(sizeof(uint64_t) + work.bytes, 1), in(out.size());
    const uint64_t size = work.bytes;
    std::memcpy(out.data(), &size, sizeof(size));
    return Repeat(budget, [&]() -> absl::StatusOr<double> {
      const double start = MicrosNow();
      if (!WriteAll(fd_, out.data(), out.size())) return Failed("write");
      if (!ReadAll(fd_, in.data(), in.size())) return Failed("read");
      const double micros = MicrosNow() - start;
      if (in.back() != out.back()) return absl::InternalError("the echo is wrong");
      return micros;
    });
  }

 private:
  void Echo() {
    std::vector<char> buffer;
    uint64_t size;
    while (ReadAll(fd_, reinterpret_cast<char*>(&size), sizeof(size))) {
      if (buffer.size() < size + sizeof(size)) buffer.resize(size + sizeof(size));
      std::memcpy(buffer.data(), &size, sizeof(size));
      if (!ReadAll(fd_, buffer.data() + sizeof(size), size)) return;
      if (!WriteAll(fd_, buffer.data(), size + sizeof(size))) return;
    }
  }

  const int fd_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartSockets(const SideOptions& place) {
  const Address address = AddressOf(place);
  const auto* const raw = reinterpret_cast<const sockaddr*>(&address.storage);
  int fd = socket(address.family, SOCK_STREAM, 0);
  if (fd < 0) return Failed("socket");
  if (place.rank == 1) {
    const int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, raw, address.size) != 0 || listen(fd, 1) != 0) return Failed("listen");
    const int accepted = accept(fd, nullptr, nullptr);
    close(fd);
    if (accepted < 0) return Failed("accept");
    fd = accepted;
  } else {
    // The other process starts at the same time.
    const double give_up = MicrosNow() + 20e6;
    while (connect(fd, raw, address.size) != 0) {
      if (MicrosNow() > give_up) return Failed("connect");
      usleep(1000);
    }
  }
  if (address.family == AF_INET) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  return std::make_unique<SocketSide>(fd, place.rank == 1);
}

}  // namespace distgrad
