// Segments of GPUs over TensorPipe's channel for them, on the stand-in for CUDA: what every
// transport must do, and what a GPU adds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <signal.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "core/tensor/gpu_memory.h"
#include "core/transport/tensorpipe/gpu_channel.h"
#include "core/transport/tensorpipe/tensorpipe_transport.h"
#include "core/transport/transport_conformance.h"
#include "core/transport/transport_testing.h"
#include "gtest/gtest.h"
#include "tensorpipe/tensorpipe.h"
#include "tests/testing/child_process.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

using Kind = TensorPipeOptions::Kind;

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream NewStream(int index) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(index));
}

std::unique_ptr<Transport> NewTransport(Kind kind, bool with_gpus = true,
                                        uint64_t max_packet_bytes = uint64_t{1} << 30) {
  TensorPipeOptions options;
  options.kind = kind;
  options.max_packet_bytes = max_packet_bytes;
  if (with_gpus) options.gpus = NewGpuMemory();
  auto transport = NewTensorPipeTransport(std::move(options));
  EXPECT_TRUE(transport.ok()) << transport.status();
  return *std::move(transport);
}

INSTANTIATE_TEST_SUITE_P(TensorPipe, TransportConformanceTest,
                         testing::Values(TransportFactory{.name = "socket_with_gpus",
                                                          .start =
                                                              [] {
                                                                return TransportFactory::Make([] {
                                                                  return NewTransport(
                                                                      Kind::kSocket);
                                                                });
                                                              }},
                                         TransportFactory{.name = "tcp_with_gpus",
                                                          .start =
                                                              [] {
                                                                return TransportFactory::Make([] {
                                                                  return NewTransport(Kind::kTcp);
                                                                });
                                                              }}),
                         TransportFactoryName);

at::Tensor Bytes(int64_t size) { return at::randint(0, 256, {size}, at::kByte).pin_memory(); }

// What is on a GPU as a segment for one of the other end's, ready in the order of a stream.
Segment SegmentOf(const at::Tensor& tensor, int target, const c10::Stream& stream) {
  Segment segment;
  segment.owner = std::make_shared<at::Tensor>(tensor);
  segment.data = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  segment.size = tensor.nbytes();
  segment.device = tensor.device().index();
  segment.target = target;
  segment.stream = stream.native_handle();
  return segment;
}
Segment SegmentOf(const at::Tensor& tensor, int target) {
  return SegmentOf(tensor, target,
                   c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device()));
}

// What a segment has, read at once on a stream that waits for nobody.
at::Tensor Read(const Segment& segment) {
  const c10::StreamGuard guard(NewStream(segment.device));
  at::Tensor source = at::empty({0}, at::TensorOptions(at::kByte).device(Gpu(segment.device)));
  source.set_(*static_cast<c10::Storage*>(segment.owner.get()), 0,
              {static_cast<int64_t>(segment.size)});
  return source.cpu();
}

// Two transports, and a connection between them.
struct Link {
  explicit Link(bool client_gpus = true, bool server_gpus = true,
                uint64_t max_packet_bytes = uint64_t{1} << 30)
      : client_transport(NewTransport(Kind::kSocket, client_gpus)),
        server_transport(NewTransport(Kind::kSocket, server_gpus, max_packet_bytes)) {
    absl::Notification accepted;
    address = server_transport
                  ->Listen([&](std::shared_ptr<Connection> connection) {
                    server = std::move(connection);
                    accepted.Notify();
                    return at_server;
                  })
                  .value();
    client = client_transport->Connect(address, at_client).value();
    accepted.WaitForNotification();
  }
  ~Link() {
    client_transport = nullptr;
    server_transport = nullptr;
    sends.AwaitAll();
  }

  SendLog sends;
  std::shared_ptr<RecordingReceiver> at_client = std::make_shared<RecordingReceiver>();
  std::shared_ptr<RecordingReceiver> at_server = std::make_shared<RecordingReceiver>();
  std::unique_ptr<Transport> client_transport, server_transport;
  std::string address;
  std::shared_ptr<Connection> client, server;
};

Packet PacketOf(Segment segment) {
  Packet packet;
  packet.bytes = "with a GPU's";
  packet.segments.push_back(std::move(segment));
  return packet;
}

TEST(GpuTransportTest, EverySizeBetweenAllGpus) {
  Link link;
  EXPECT_TRUE(link.client_transport->CarriesDevices(link.address));
  EXPECT_TRUE(link.client_transport->IsOnThisMachine(link.address));
  EXPECT_TRUE(absl::EndsWith(link.client_transport->Name(), "+cuda_basic"));
  std::vector<at::Tensor> sent;
  for (const int64_t size : {1, 4097, 1 << 20, (1 << 20) + 1, 5000000}) {
    for (int from = 0; from < fake_cuda::kDevices; ++from) {
      const int to = (from + static_cast<int>(sent.size())) % fake_cuda::kDevices;
      sent.push_back(Bytes(size));
      link.client->Send(PacketOf(SegmentOf(sent.back().to(Gpu(from)), to)), link.sends.NewDone());
      link.at_server->AwaitPackets(sent.size());
      const Segment& segment = link.at_server->packet(sent.size() - 1).segments.at(0);
      EXPECT_EQ(segment.device, to);
      EXPECT_TRUE(Read(segment).equal(sent.back())) << size << " bytes to " << to;
    }
  }
  EXPECT_EQ(link.at_server->packet(0).bytes, "with a GPU's");
}

TEST(GpuTransportTest, BothWaysAndAmongOtherSegments) {
  Link link;
  const at::Tensor first = Bytes(300000), second = Bytes(70000);
  const auto make = [&] {
    Packet packet = PatternPacket(7, std::string(100000, 'b'), {1 << 20, 10, 300});
    packet.segments.insert(packet.segments.begin() + 1, SegmentOf(first.to(Gpu(0)), 1));
    packet.segments.push_back(SegmentOf(second.to(Gpu(2)), 0));
    return packet;
  };
  link.client->Send(make(), link.sends.NewDone());
  link.at_server->AwaitPackets(1);
  link.server->Send(make(), link.sends.NewDone());
  link.at_client->AwaitPackets(1);
  for (const auto& receiver : {link.at_server, link.at_client}) {
    const Packet& packet = receiver->packet(0);
    ASSERT_EQ(packet.segments.size(), 5u);
    EXPECT_TRUE(Read(packet.segments[1]).equal(first));
    EXPECT_TRUE(Read(packet.segments[4]).equal(second));
    EXPECT_EQ(packet.segments[4].device, 0);
    Packet others{packet.bytes, {packet.segments[0], packet.segments[2], packet.segments[3]}};
    ExpectPattern(others, 7, std::string(100000, 'b'), {1 << 20, 10, 300});
  }
}

// The bytes are written on a stream that stands still until after the send.
TEST(GpuTransportTest, WhatIsSentIsReadInTheOrderOfItsStream) {
  Link link;
  const at::Tensor sent = Bytes(3000000);
  const c10::Stream stream = NewStream(1);
  {
    const fake_cuda::Standstill standstill(stream.native_handle());
    const c10::StreamGuard guard(stream);
    at::Tensor there = at::empty({3000000}, at::TensorOptions(at::kByte).device(Gpu(1)));
    there.copy_(sent, /*non_blocking=*/true);
    link.client->Send(PacketOf(SegmentOf(there, 2, stream)), link.sends.NewDone());
    link.client->Send(BytesPacket("behind it"), link.sends.NewDone());
  }
  link.at_server->AwaitPackets(2);
  EXPECT_TRUE(Read(link.at_server->packet(0).segments[0]).equal(sent));
}

// The receiver reads in OnPacket, on a stream that waits for nobody, while all streams are late.
TEST(GpuTransportTest, WhatArrivesIsThere) {
  Link link;
  std::vector<at::Tensor> read;
  link.at_server->on_packet = [&](const Packet& packet) {
    read.push_back(Read(packet.segments[0]));
  };
  std::vector<at::Tensor> sent;
  for (int i = 0; i < 10; ++i) {
    sent.push_back(Bytes(100000 + i));
    link.client->Send(PacketOf(SegmentOf(sent.back().to(Gpu(0)), 1)), link.sends.NewDone());
  }
  link.at_server->AwaitPackets(10);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(read[i].equal(sent[i])) << i;
}

TEST(GpuTransportTest, WhoClosesInTheMiddle) {
  Link link;
  const at::Tensor there = Bytes(20000000).to(Gpu(0));
  const c10::Stream stream = NewStream(0);
  {
    const fake_cuda::Standstill standstill(stream.native_handle());
    link.client->Send(PacketOf(SegmentOf(there, 1, stream)), link.sends.NewDone());
    link.client->Close();
  }
  EXPECT_EQ(link.at_server->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(link.at_client->AwaitClosed().code(), absl::StatusCode::kCancelled);
  link.sends.AwaitAll();
  EXPECT_EQ(link.at_server->count(), 0u);
}

TEST(GpuTransportTest, OneEndWithoutAChannel) {
  for (const bool client_has : {true, false}) {
    Link link(client_has, !client_has);
    EXPECT_FALSE(link.client_transport->CarriesDevices(link.address));
    link.client->Send(BytesPacket("hello"), link.sends.NewDone());
    link.at_server->AwaitPackets(1);
    const Segment segment = SegmentOf(Bytes(10000).to(Gpu(0)), 0);
    absl::Status why;
    (client_has ? link.client : link.server)
        ->Send(PacketOf(segment), [&why](const absl::Status& status) { why = status; });
    EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), "have a channel")) << why;
    link.client->Send(BytesPacket("goes on"), link.sends.NewDone());
    link.at_server->AwaitPackets(2);
  }
}

TEST(GpuTransportTest, AGpuThatIsNotThere) {
  Link link;
  const at::Tensor there = Bytes(10000).to(Gpu(0));
  for (const int target : {-1, fake_cuda::kDevices}) {
    absl::Status why;
    link.client->Send(PacketOf(SegmentOf(there, target)),
                      [&why](const absl::Status& status) { why = status; });
    EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition) << why;
  }
}

TEST(GpuTransportTest, NoMemoryForWhatArrives) {
  Link link;
  const size_t most = fake_cuda::kDeviceBytes;
  const at::Tensor all = at::empty({static_cast<int64_t>(most - (40 << 20))},
                                   at::TensorOptions(at::kByte).device(Gpu(2)));
  link.client->Send(PacketOf(SegmentOf(Bytes(50 << 20).to(Gpu(0)), 2)), link.sends.NewDone());
  const absl::Status why = link.at_server->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kResourceExhausted) << why;
  EXPECT_TRUE(absl::StrContains(why.message(), "bytes of cuda:2")) << why;
  EXPECT_EQ(link.at_client->AwaitClosed().code(), absl::StatusCode::kUnavailable);
}

TEST(GpuTransportTest, BeyondTheLimit) {
  Link link(true, true, /*max_packet_bytes=*/100000);
  link.client->Send(PacketOf(SegmentOf(Bytes(100001).to(Gpu(0)), 0)), link.sends.NewDone());
  const absl::Status why = link.at_server->AwaitClosed();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;  // nothing is discarded on a GPU
  EXPECT_TRUE(absl::StrContains(why.message(), "limit message_bytes is 100000")) << why;
}

// A TensorPipe peer that says one thing and sends another. (What TensorPipe itself would not send
// is in message_layout_test.)
TEST(GpuTransportTest, HostileDescriptors) {
  struct Case {
    std::string greeting;
    int source;  // the stand-in's devices all have the channel
    std::optional<tensorpipe::Device> target;
  };
  const auto gpu = [](int index) { return tensorpipe::Device(tensorpipe::kCudaDeviceType, index); };
  const tensorpipe::Device cpu(tensorpipe::kCpuDeviceType, 0);
  for (const Case& hostile : std::vector<Case>{
           {"distgrad 1", 0, gpu(0)},
           {"distgrad 1#gpus=1", 1, gpu(0)},
           {"distgrad 1#gpus=3", 0, cpu},
           {"distgrad 1#gpus=3", 0, std::nullopt},
       }) {
    auto server = NewTransport(Kind::kTcp);
    auto receiver = std::make_shared<RecordingReceiver>();
    std::string address =
        server->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value();
    address.resize(address.find('#'));
    tensorpipe::Context context;
    context.registerTransport(0, "tcp", tensorpipe::transport::uv::create());
    context.registerChannel(0, "basic", tensorpipe::channel::basic::create());
    context.registerChannel(2, "cuda_basic", NewGpuChannel());
    auto pipe = context.connect(address);
    const at::Tensor there = Bytes(100).to(Gpu(hostile.source));
    tensorpipe::Message greeting, message;
    greeting.metadata = hostile.greeting;
    tensorpipe::Message::Tensor tensor;
    tensor.buffer = GpuBuffer(SegmentOf(there, 0));
    tensor.length = 100;
    if (hostile.target.has_value()) tensor.targetDevice = *hostile.target;
    message.tensors.push_back(tensor);
    pipe->write(std::move(greeting), [](const tensorpipe::Error&) {});
    pipe->write(std::move(message), [](const tensorpipe::Error&) {});
    const absl::Status why = receiver->AwaitClosed();
    EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
    EXPECT_TRUE(absl::StrContains(why.message(), "no channel")) << why;
    EXPECT_EQ(receiver->count(), 0u);
    context.join();
  }
}

// Sends until it is killed.
int SendForEver(const std::string& address) {
  auto transport = NewTransport(Kind::kSocket);
  const at::Tensor there = Bytes(30000000).to(Gpu(0));
  auto receiver = std::make_shared<RecordingReceiver>();
  auto connection = transport->Connect(address, receiver).value();
  while (!receiver->closed()) {
    absl::Notification sent;
    connection->Send(PacketOf(SegmentOf(there, 1)), [&](const absl::Status&) { sent.Notify(); });
    sent.WaitForNotification();
  }
  return 0;
}

TEST(GpuTransportTest, APeerIsKilledInTheMiddle) {
  auto transport = NewTransport(Kind::kSocket);
  auto receiver = std::make_shared<RecordingReceiver>();
  const std::string address =
      transport->Listen([&](std::shared_ptr<Connection>) { return receiver; }).value();
  ChildProcess child({"--send", address});
  receiver->AwaitPackets(1);
  child.Signal(SIGKILL);
  EXPECT_EQ(receiver->AwaitClosed().code(), absl::StatusCode::kUnavailable);
  // All goes on.
  Link link;
  link.client->Send(PacketOf(SegmentOf(Bytes(1000).to(Gpu(0)), 1)), link.sends.NewDone());
  link.at_server->AwaitPackets(1);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--send") return distgrad::SendForEver(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
