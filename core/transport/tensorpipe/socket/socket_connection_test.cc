// Turns of the loop between a connection with much to read and the others.
#include "core/transport/tensorpipe/socket/socket_connection.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/future.h"
#include "core/net/cluster_key.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/loop.h"
#include "core/net/tls.h"
#include "core/transport/tensorpipe/socket/error.h"
#include "core/transport/tensorpipe/socket/socket_listener.h"
#include "core/transport/tensorpipe/socket/socket_options.h"
#include "gtest/gtest.h"
#include "nop/structure.h"
#include "tensorpipe/common/nop.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/free_port.h"

namespace {

// Of this thread; 0: none. The second one is of sockets for datagrams.
thread_local int connect_error = 0, datagram_error = 0, watch_error = 0;
// Whether the kernel chooses the port that is connected to, of those that are free.
thread_local bool connects_to_itself = false;

template <typename F>
F* Real(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// These stand before those of libc, and fail where they are to.
extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  static auto* const real = Real<decltype(connect)>("connect");
  int type = 0;
  socklen_t type_size = sizeof(type);
  getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size);
  const int error = type == SOCK_DGRAM ? datagram_error : connect_error;
  if (connects_to_itself) {
    EXPECT_EQ(bind(fd, address, size), 0);
  }
  if (error == 0) return real(fd, address, size);
  errno = error;
  return -1;
}
extern "C" int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  static auto* const real = Real<decltype(epoll_ctl)>("epoll_ctl");
  if (watch_error == 0 || operation != EPOLL_CTL_ADD) return real(epoll, operation, fd, event);
  errno = watch_error;
  return -1;
}

namespace distgrad {
namespace {

// However many frames have come, and however short they are: others have their turn.
TEST(SocketConnectionTest, ManySmallFramesLeaveTurnsToOthers) {
  constexpr int kFrames = 10'000;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Fd far(ends[1]);
  // All of them are there at once.
  std::string frames;
  for (int i = 0; i < kFrames; ++i) {
    const uint64_t size = 1;
    frames.append(reinterpret_cast<const char*>(&size), sizeof(size));
    frames += static_cast<char>(i);
  }
  ASSERT_EQ(send(far.get(), frames.data(), frames.size(), 0), static_cast<ssize_t>(frames.size()));

  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
  int read = 0, read_in_first_turn = 0, wrong = 0;  // on the loop's thread
  Promise<Unit> promise;
  const Future<Unit> all_read = promise.future();
  loop->Run([&] {
    for (int i = 0; i < kFrames; ++i) {
      connection->Read(
          nullptr, 0, [&, i](const tensorpipe::Error& error, const void* data, size_t size) {
            if (error || size != 1 || *static_cast<const char*>(data) != static_cast<char>(i)) {
              ++wrong;
            }
            if (++read == 1) loop->Run([&] { read_in_first_turn = read; });
            if (read == kFrames) promise.Set(Unit());
          });
    }
  });
  all_read.Wait();
  connection->Close();
  loop->Close();
  loop->Join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(read_in_first_turn, 0);
  EXPECT_LT(read_in_first_turn, 2'000);
}

// TensorPipe would wait for ever for what it was not told.
TEST(SocketConnectionTest, WithoutMemoryItEndsAllTheSame) {
  for (int count = 1; count <= 3; ++count) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(testing::Message() << count << " allocations from " << nth);
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
      const Fd far(ends[1]);
      const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
      const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
      absl::Notification read;
      connection->Read(nullptr, 0, [&](const tensorpipe::Error& error, const void*, size_t) {
        EXPECT_TRUE(error);
        read.Notify();
      });
      FailAllocation(nth, count);
      connection->Close();
      failed = FailAllocation(-1);
      read.WaitForNotification();
      loop->Close();
      loop->Join();
    }
  }
}

// Each fifth of them needs a new block of a queue.
TEST(SocketConnectionTest, WithoutMemoryWhatIsAskedForIsAnsweredAllTheSame) {
  const std::string bytes(size_t{32} << 20, 'x');  // more than the system takes
  int answered = 0;
  const auto count = [&](const auto&...) { ++answered; };
  const auto done = std::ref(count);  // needs no memory
  const std::pair<const char*, std::function<void(SocketConnection&)>> kinds[] = {
      {"read", [&](SocketConnection& it) { it.Read(nullptr, 0, done); }},
      {"write", [&](SocketConnection& it) { it.Write(bytes.data(), bytes.size(), done); }},
      {"two", [&](SocketConnection& it) { it.Write("x", bytes.data(), bytes.size(), done); }}};
  for (const auto& [kind, ask] : kinds) {
    SCOPED_TRACE(kind);
    FailEachAllocation([&, &ask = ask](absl::FunctionRef<void()> lack) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
      const Fd far(ends[1]);
      const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
      const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
      int asked = 0;
      answered = 0;
      lack();
      for (int i = 0; i < 12; ++i) {
        try {
          ask(*connection);
          ++asked;
        } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): its caller is told
        }
      }
      const bool failed = FailAllocation(-1);
      connection->Close();
      EXPECT_EQ(answered, asked);
      loop->Close();
      loop->Join();
      return failed;
    });
  }
}

using Cause = TextError::Cause;

// Has a connection begin whose allocation number `nth` fails (none if negative), and returns why it
// ends; nullopt where it does not begin.
std::optional<Cause> WhyItEnds(int nth, bool* failed, int port = 1) {
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  Endpoint endpoint;
  endpoint.tcp = absl::StrCat("127.0.0.1:", port);
  std::shared_ptr<SocketConnection> connection;
  FailAllocation(nth);
  try {
    connection = SocketConnection::Connect(loop, endpoint, {});
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the result says so
  }
  *failed = FailAllocation(-1);
  std::optional<Cause> cause;
  if (connection != nullptr) {
    absl::Notification ended;
    connection->Read(nullptr, 0, [&](const tensorpipe::Error& error, const void*, size_t) {
      const auto text = error.castToType<TextError>();
      if (text != nullptr) cause = text->cause();
      ended.Notify();
    });
    ended.WaitForNotification();
  }
  loop->Close();
  loop->Join();
  return cause;
}

// That says nothing of the other end, which a watcher would take for lost.
TEST(SocketConnectionTest, WithoutMemoryItSaysSo) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    const std::optional<Cause> cause = WhyItEnds(nth, &failed);
    if (cause.has_value()) {
      EXPECT_EQ(*cause, failed ? Cause::kExhausted : Cause::kNobodyListens);
    }
  }
}

// Nor do most errors: one alone says that nobody listens there.
TEST(SocketConnectionTest, WhatConnectingFailsWithSaysWhetherSomebodyMayBeThere) {
  const std::pair<int, Cause> causes[] = {
      {ECONNREFUSED, Cause::kNobodyListens}, {ENETUNREACH, Cause::kOther},
      {EHOSTUNREACH, Cause::kOther},         {EACCES, Cause::kOther},
      {EADDRNOTAVAIL, Cause::kExhausted},    {ENOBUFS, Cause::kExhausted}};
  bool failed;
  for (const auto& [error, cause] : causes) {
    SCOPED_TRACE(error);
    connect_error = error;
    EXPECT_EQ(WhyItEnds(/*nth=*/-1, &failed), cause);
    connect_error = 0;
  }
}

// TCP connects a socket whose own port is the one that it looks for.
TEST(SocketConnectionTest, OneThatHasReachedItselfHasReachedNobody) {
  bool failed;
  connects_to_itself = true;
  EXPECT_EQ(WhyItEnds(/*nth=*/-1, &failed, FreePort()), Cause::kNobodyListens);
  connects_to_itself = false;
}

// connect() fails alike where all ports are in use, and for all of IPv6 where that is switched off.
// The latter lasts: a member that is never reached would never be taken for lost.
TEST(SocketConnectionTest, WhoHasNoAddressOfThatKindHasNotRunOutOfPorts) {
  bool failed;
  connect_error = datagram_error = EADDRNOTAVAIL;
  EXPECT_EQ(WhyItEnds(/*nth=*/-1, &failed), Cause::kOther);
  connect_error = datagram_error = 0;
}

// As beyond the limit on what a user may watch (fs.epoll.max_user_watches).
TEST(SocketConnectionTest, OneThatCannotBeWatchedSaysSo) {
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  Endpoint endpoint;
  endpoint.tcp = "127.0.0.1:1";
  connect_error = EINPROGRESS;
  watch_error = ENOSPC;
  const auto connection = SocketConnection::Connect(loop, endpoint, {});
  connect_error = watch_error = 0;
  bool is_over = false;
  connection->Read(nullptr, 0, [&](const tensorpipe::Error& error, const void*, size_t) {
    is_over = true;
    EXPECT_EQ(error.castToType<TextError>()->cause(), Cause::kExhausted) << error.what();
  });
  EXPECT_TRUE(is_over);
  connection->Close();
  loop->Close();
  loop->Join();
}

struct Words {
  std::string text;
  NOP_STRUCTURE(Words, text);
};

// On the loop's thread, where an object is read whose parts need memory.
TEST(SocketConnectionTest, WithoutMemoryAnObjectIsHeardOfAllTheSame) {
  tensorpipe::NopHolder<Words> sent;
  sent.getObject().text = std::string(100, 'x');
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto near = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
    const auto far = SocketConnection::Adopt(loop, Fd(ends[1]), nullptr);
    tensorpipe::NopHolder<Words> received;
    absl::Notification stands, read, over;
    bool is_read = false;
    const auto done = [&](const tensorpipe::Error& error) {  // needs no memory itself
      is_read = !error;
      read.Notify();
    };
    far->Read(&received, std::ref(done));
    loop->Run([&, nth] {
      FailAllocation(nth);
      stands.Notify();
    });
    stands.WaitForNotification();
    near->Write(sent, [](const tensorpipe::Error&) {});
    ASSERT_TRUE(read.WaitForNotificationWithTimeout(absl::Seconds(30)));
    loop->Run([&] {
      failed = FailAllocation(-1);
      over.Notify();
    });
    over.WaitForNotification();
    if (is_read) {
      EXPECT_EQ(received.getObject().text, sent.getObject().text);
    }
    near->Close();
    far->Close();
    loop->Close();
    loop->Join();
  }
}

// Each waits for its own, and the loop for the connection.
TEST(SocketConnectionTest, ACallbackThatThrowsKeepsNoOtherFromItsEnd) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Fd far(ends[1]);
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
  const std::string bytes(size_t{32} << 20, 'x');  // more than the system takes
  int ended = 0;
  for (int i = 0; i < 2; ++i) {
    connection->Read(nullptr, 0, [&](const tensorpipe::Error&, const void*, size_t) {
      ++ended;
      throw std::bad_alloc();
    });
    connection->Write(bytes.data(), bytes.size(), [&](const tensorpipe::Error&) {
      ++ended;
      throw std::bad_alloc();
    });
  }
  connection->Close();
  EXPECT_EQ(ended, 4);
  loop->Close();
  loop->Join();
}

// The same on the loop's thread, which hears once of each event.
TEST(SocketConnectionTest, WithoutMemoryTheLoopsThreadHearsOfTheOtherEndsEnd) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    Fd far(ends[1]);
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto connection = SocketConnection::Adopt(loop, Fd(ends[0]), nullptr);
    absl::Notification read;
    connection->Read(nullptr, 0, [&](const tensorpipe::Error& error, const void*, size_t) {
      EXPECT_TRUE(error);
      failed = FailAllocation(-1);
      read.Notify();
    });
    loop->Run([&, nth] {
      far = Fd();
      FailAllocation(nth);
    });
    read.WaitForNotification();
    connection->Close();
    loop->Close();
    loop->Join();
  }
}

// The two ends of a connection within TLS: one is a connection, the other bytes in memory.
class TlsPeer {
 public:
  explicit TlsPeer(std::shared_ptr<Loop> loop) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    far_ = Fd(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    auto server = TlsSession::Create(Handshake::Role::kServer, kSecret).value();
    session_ = TlsSession::Create(Handshake::Role::kClient, kSecret).value();
    while (!server->established()) {
      ExpectOk(session_->Establish());
      Pass(*session_, *server);
      ExpectOk(server->Establish());
      Pass(*server, *session_);
    }
    connection_ = SocketConnection::Adopt(std::move(loop), Fd(ends[0]), std::move(server));
  }
  SocketConnection& connection() { return *connection_; }

  void SendFrame(const std::string& bytes) {
    const uint64_t size = bytes.size();
    ExpectOk(session_->Write({reinterpret_cast<const char*>(&size), sizeof(size)}));
    ExpectOk(session_->Write(bytes));
    Flush();
  }
  // The same of many frames, each byte of them in a record of its own.
  void SendFramesInBytes(const std::vector<std::string>& frames) {
    for (const std::string& bytes : frames) {
      const uint64_t size = bytes.size();
      std::string frame(reinterpret_cast<const char*>(&size), sizeof(size));
      frame += bytes;
      for (const char byte : frame) ExpectOk(session_->Write({&byte, 1}));
    }
    Flush();
  }
  void Close() { far_ = Fd(); }

 private:
  static constexpr Digest kSecret = {1, 2, 3};
  static void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }
  static void Pass(TlsSession& from, TlsSession& to) {
    const absl::string_view output = from.output();
    to.AddInput(output.copy(to.InputSpace().data(), output.size()));
    from.DropOutput(output.size());
  }
  void Flush() {
    while (!session_->output().empty()) {
      const ssize_t n = send(far_.get(), session_->output().data(), session_->output().size(), 0);
      ASSERT_GT(n, 0);
      session_->DropOutput(static_cast<size_t>(n));
    }
  }

  Fd far_;
  std::shared_ptr<SocketConnection> connection_;
  std::unique_ptr<TlsSession> session_;
};

// A record of TLS takes its time, too, however little is in it.
TEST(SocketConnectionTest, ManySmallRecordsLeaveTurnsToOthers) {
  constexpr int kFrames = 300;
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  TlsPeer peer(loop);
  int read = 0, read_in_first_turn = 0, wrong = 0;  // on the loop's thread
  Promise<Unit> promise;
  const Future<Unit> all_read = promise.future();
  absl::Notification sent;
  loop->Run([&] {
    sent.WaitForNotification();  // all of them are there at once
    for (int i = 0; i < kFrames; ++i) {
      peer.connection().Read(
          nullptr, 0, [&, i](const tensorpipe::Error& error, const void* data, size_t size) {
            if (error || size != 1 || *static_cast<const char*>(data) != static_cast<char>(i)) {
              ++wrong;
            }
            if (++read == 1) loop->Run([&] { read_in_first_turn = read; });
            if (read == kFrames) promise.Set(Unit());
          });
    }
  });
  std::vector<std::string> frames;
  for (int i = 0; i < kFrames; ++i) frames.emplace_back(1, static_cast<char>(i));
  peer.SendFramesInBytes(frames);
  sent.Notify();
  all_read.Wait();
  peer.connection().Close();
  loop->Close();
  loop->Join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(read_in_first_turn, 0);
  EXPECT_LT(read_in_first_turn, 50);
}

// What came before the end of a connection is delivered, though both are read in one turn.
TEST(SocketConnectionTest, WhatCameBeforeTheEndIsDelivered) {
  const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
  TlsPeer peer(loop);
  // The loop's thread waits until the frame and the end behind it are there.
  absl::Notification sent;
  loop->Run([&] { sent.WaitForNotification(); });
  Promise<std::string> first, second;
  const auto keep = [](Promise<std::string>& promise) {
    return [&promise](const tensorpipe::Error& error, const void* data, size_t size) {
      promise.Set(error ? "error" : std::string(static_cast<const char*>(data), size));
    };
  };
  peer.connection().Read(nullptr, 0, keep(first));
  peer.connection().Read(nullptr, 0, keep(second));
  peer.SendFrame("the last words");
  peer.Close();
  sent.Notify();
  EXPECT_EQ(first.future().Wait().value(), "the last words");
  EXPECT_EQ(second.future().Wait().value(), "error");
  loop->Close();
  loop->Join();
}

// Nobody reads at the other end, though its process lives.
TEST(SocketConnectionTest, AnEndThatTakesNothingIsGivenUp) {
  const std::string bytes(size_t{32} << 20, 'x');  // more than the system takes
  SocketOptions options;
  options.unix_sockets = false;
  options.acknowledge_timeout = absl::Seconds(1);
  for (const bool by_server : {false, true}) {
    const std::shared_ptr<Loop> loop = *Loop::Start("test-sockets");
    const auto listener = *SocketListener::Listen(loop, "127.0.0.1", options);
    Promise<std::shared_ptr<SocketConnection>> accepted;
    listener->Accept([&](const tensorpipe::Error&, std::shared_ptr<SocketConnection> connection) {
      accepted.Set(std::move(connection));
    });
    const auto client =
        SocketConnection::Connect(loop, *ParseEndpoint(listener->address()), options);
    const auto server = accepted.future().Wait().value();
    Promise<std::string> promise;
    (by_server ? server : client)
        ->Write(bytes.data(), bytes.size(),
                [&](const tensorpipe::Error& error) { promise.Set(error ? error.what() : ""); });
    const std::string why = promise.future().Wait().value();
    EXPECT_TRUE(absl::StrContains(why, "timed out")) << by_server << ": " << why;
    loop->Close();
    loop->Join();
  }
}

}  // namespace
}  // namespace distgrad
