// Round trips between two processes (for "inproc" two transports of one): the time from Send
// to the echo's arrival.
//
//   transport_benchmark [--beside] [socket_basic socket_cma socket_over_tcp socket_over_tls
//                                   tcp_basic shm_basic inproc]
//
// --beside: alone, and while another connection of the same two transports echoes 16 MB again and
// again, the round trips of 4 B.
//
// Where a packet's bytes go from the header to a payload, and a segment from a payload to the
// channel (kMetadataBytes, kChannelBytes), was chosen with it.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/transport/inproc/inproc_transport.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

struct Shape {
  const char* name;
  size_t bytes;
  size_t segment;
};
const Shape kShapes[] = {
    {"4 B bytes", 4, 0},
    {"4 KB bytes", 4 << 10, 0},
    {"16 KB bytes", 16 << 10, 0},
    {"32 KB bytes", 32 << 10, 0},
    {"64 KB bytes", 64 << 10, 0},
    {"128 KB bytes", 128 << 10, 0},
    {"16 KB segment", 100, 16 << 10},
    {"64 KB segment", 100, 64 << 10},
    {"128 KB segment", 100, 128 << 10},
    {"256 KB segment", 100, 256 << 10},
    {"512 KB segment", 100, 512 << 10},
    {"1 MB segment", 100, 1 << 20},
    {"16 MB segment", 100, 16 << 20},
};

absl::StatusOr<std::unique_ptr<Transport>> New(const std::string& combination) {
  TensorPipeOptions options;
  using Kind = TensorPipeOptions::Kind;
  options.kind = absl::StartsWith(combination, "tcp")   ? Kind::kTcp
                 : absl::StartsWith(combination, "shm") ? Kind::kShm
                                                        : Kind::kSocket;
  options.unix_sockets = !absl::StrContains(combination, "_over_");
  if (absl::EndsWith(combination, "tls")) options.cluster_key = "a key of a benchmark";
  if (!absl::EndsWith(combination, "cma")) options.channel = TensorPipeOptions::Channel::kBasic;
  return NewTensorPipeTransport(options);
}

class Echo : public Receiver {
 public:
  void OnPacket(Packet packet) override { connection->Send(std::move(packet), nullptr); }
  void OnClosed(absl::Status) override { closed.Notify(); }

  std::shared_ptr<Connection> connection;
  absl::Notification closed;
};

// Counts what comes back.
class Counter : public Receiver {
 public:
  void OnPacket(Packet packet) override {
    absl::MutexLock lock(&mu_);
    ++count_;
    last_ = std::move(packet);  // the memory is freed by whoever replaces it
  }
  void OnClosed(absl::Status why) override {
    std::fprintf(stderr, "closed: %s\n", why.ToString().c_str());
  }
  // The `count`th packet, to be sent again.
  Packet Await(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [&] {
      mu_.AssertReaderHeld();
      return count_ >= count;
    };
    mu_.Await(absl::Condition(&enough));
    return std::move(last_);
  }

 private:
  absl::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
  Packet last_ ABSL_GUARDED_BY(mu_);
};

// Until the first connection is closed.
int Serve(const std::string& combination) {
  auto first = std::make_shared<Echo>();
  bool is_first = true;  // one connection after the other is taken
  auto transport = New(combination);
  if (!transport.ok()) return 1;
  const auto address = (*transport)->Listen([&](std::shared_ptr<Connection> connection) {
    auto echo = std::exchange(is_first, false) ? first : std::make_shared<Echo>();
    echo->connection = std::move(connection);
    return echo;
  });
  if (!address.ok()) return 1;
  std::printf("%s\n", address->c_str());
  std::fflush(stdout);
  first->closed.WaitForNotification();
  return 0;
}

// Echoes 16 MB by a connection of its own, until it is told to end.
class Stream {
 public:
  Stream(Transport& transport, const std::string& address)
      : counter_(std::make_shared<Counter>()),
        connection_(transport.Connect(address, counter_).value()),
        thread_([this] { Run(); }) {}
  ~Stream() {
    ends_ = true;
    thread_.join();
    connection_->Close();
  }
  int echoes() const { return echoes_; }
  static constexpr size_t kBytes = 16 << 20;

 private:
  void Run() {
    Packet packet;
    packet.bytes.assign(100, 'x');
    packet.segments.push_back(AllocateSegment(kBytes));
    std::memset(packet.segments[0].data, 1, kBytes);
    while (!ends_) {
      connection_->Send(std::move(packet), nullptr);
      packet = counter_->Await(++echoes_);
    }
  }

  const std::shared_ptr<Counter> counter_;
  const std::shared_ptr<Connection> connection_;
  std::atomic<int> echoes_{0};
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

void SmallOnes(const char* name, const char* beside, Connection& connection, Counter& counter,
               int rounds, int* sent) {
  std::vector<double> micros;
  for (int i = -rounds / 10; i < rounds; ++i) {
    const absl::Time start = absl::Now();
    connection.Send(Packet{"four", {}}, nullptr);
    counter.Await(++*sent);
    if (i >= 0) micros.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  std::sort(micros.begin(), micros.end());
  absl::PrintF("%-16s 4 B %-14s median %8.1f us   p90 %8.1f   p99 %8.1f", name, beside,
               micros[micros.size() / 2], micros[micros.size() * 9 / 10],
               micros[micros.size() * 99 / 100]);
}

int RunBeside(const std::string& combination) {
  auto transport = New(combination);
  if (!transport.ok()) return 1;
  ChildProcess child({"--serve", combination});
  const std::string address = child.ReadLine();
  auto counter = std::make_shared<Counter>();
  const auto connection = (*transport)->Connect(address, counter).value();
  int sent = 0;
  SmallOnes(combination.c_str(), "alone", *connection, *counter, 20'000, &sent);
  absl::PrintF("\n");
  Stream stream(**transport, address);
  while (stream.echoes() < 5) std::this_thread::yield();
  const int before = stream.echoes();
  const absl::Time start = absl::Now();
  SmallOnes(combination.c_str(), "beside 16 MB", *connection, *counter, 5'000, &sent);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  absl::PrintF("   16 MB at %.2f GB/s each way\n",
               1e-9 * Stream::kBytes * (stream.echoes() - before) / seconds);
  std::fflush(stdout);
  return 0;
}

void PingPong(const std::string& name, Transport& transport, const std::string& address) {
  auto counter = std::make_shared<Counter>();
  auto connection = transport.Connect(address, counter).value();
  int sent = 0;
  for (const Shape& shape : kShapes) {
    Packet packet;
    packet.bytes.assign(shape.bytes, 'x');
    if (shape.segment > 0) {
      packet.segments.push_back(AllocateSegment(shape.segment));
      std::memset(packet.segments[0].data, 1, shape.segment);
    }
    const int rounds = shape.segment >= (4 << 20) ? 100 : shape.segment >= (1 << 20) ? 500 : 3000;
    std::vector<double> micros;
    for (int i = -rounds / 5; i < rounds; ++i) {
      const absl::Time start = absl::Now();
      connection->Send(std::move(packet), nullptr);
      packet = counter->Await(++sent);
      if (i >= 0) micros.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    }
    std::sort(micros.begin(), micros.end());
    absl::PrintF("%-22s %-15s median %9.1f us   p10 %9.1f   p90 %9.1f\n", name, shape.name,
                 micros[micros.size() / 2], micros[micros.size() / 10],
                 micros[micros.size() * 9 / 10]);
    std::fflush(stdout);
  }
}

void RunInproc() {
  const auto network = std::make_shared<InprocNetwork>();
  auto echo = std::make_shared<Echo>();
  auto server = NewInprocTransport(network);
  auto client = NewInprocTransport(network);
  const std::string address = server
                                  ->Listen([&](std::shared_ptr<Connection> connection) {
                                    echo->connection = std::move(connection);
                                    return echo;
                                  })
                                  .value();
  PingPong("inproc", *client, address);
}

int RunTensorPipe(const std::string& combination) {
  auto transport = New(combination);
  if (!transport.ok()) {
    std::fprintf(stderr, "%s: %s\n", combination.c_str(), transport.status().ToString().c_str());
    return 1;
  }
  ChildProcess child({"--serve", combination});
  PingPong(combination, **transport, child.ReadLine());
  return 0;
}

int Main(std::vector<std::string> names) {
  if (!names.empty() && names[0] == "--beside") {
    names.erase(names.begin());
    if (names.empty()) names = {"socket_over_tcp", "socket_over_tls"};
    for (const std::string& name : names) {
      if (RunBeside(name) != 0) return 1;
    }
    return 0;
  }
  if (names.empty()) {
    names = {"inproc",          "socket_basic", "socket_cma", "socket_over_tcp",
             "socket_over_tls", "tcp_basic",    "shm_basic"};
  }
  for (const std::string& name : names) {
    if (name == "inproc") {
      RunInproc();
    } else if (RunTensorPipe(name) != 0) {
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--serve") return distgrad::Serve(argv[2]);
  return distgrad::Main(std::vector<std::string>(argv + 1, argv + argc));
}
