// A device of Gloo's for jobs with a cluster key: every byte between two ranks is encrypted, and
// nobody gets in who has no key.
//
// Gloo has a transport with TLS of its own, and in the pinned libtorch that sends plain text
// (docs/security.md). So this one has nothing of Gloo's but the interface: its connections are
// those of the workers (core/transport/tensorpipe/socket), with their handshake and TLS, and their
// listener, which holds few strangers at a time and none for long. It listens only until all ranks
// have connected.
//
// Each rank connects to each other one, and sends on the connections that it has opened: so the two
// directions are encrypted and decrypted independently of each other. What is sent waits until the
// other rank has said that it is to receive it, so nothing has to be kept for a rank that is late.
// docs/wire.md has the bytes.
//
// As with GlooDevice, an error of one collective ends all of this rank.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_H_

#include <memory>
#include <string>

#include "core/parallel/process_group/encrypted_gloo_options.h"  // IWYU pragma: export
#include "gloo/transport/device.h"

namespace distgrad {

class EncryptedContext;

// Thread-safe. For one group alone. What fails throws StatusError.
class EncryptedGloo final : public gloo::transport::Device {
 public:
  explicit EncryptedGloo(EncryptedGlooOptions options);
  ~EncryptedGloo() override;

  // Closes all connections, and ends all collectives.
  void Abort();

  std::string str() const override { return "distgrad, encrypted"; }
  const std::string& getPCIBusID() const override { return no_bus_; }
  int getInterfaceSpeed() const override { return 0; }
  bool hasGPUDirect() const override { return false; }
  std::shared_ptr<gloo::transport::Context> createContext(int rank, int size) override;

 private:
  const EncryptedGlooOptions options_;
  const std::string no_bus_;
  std::shared_ptr<EncryptedContext> context_;  // constant once the group is connected
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_ENCRYPTED_GLOO_H_
