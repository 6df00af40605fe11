// Clients that have no business at a port of a job with certificates, each in another way.
#ifndef DISTGRAD_TESTS_TESTING_CERTIFICATE_STRANGERS_H_
#define DISTGRAD_TESTS_TESTING_CERTIFICATE_STRANGERS_H_

#include <cstdint>
#include <list>
#include <string>

#include "core/net/handshake.h"
#include "core/net/socket.h"
#include "tests/testing/certificates.h"

namespace distgrad {

// For one thread at a time.
class CertificateStrangers {
 public:
  // `ours` issues the certificates of the job, which have the name "job"; `folder` is for those of
  // an authority that is not accepted.
  CertificateStrangers(TestAuthority& ours, const std::string& folder);

  // Has them come to a port on loopback, one after the other. All know the listener's token, so
  // that it is TLS which they do not pass:
  //
  // - without a certificate, honestly and not; with one of another authority, of another name, one
  //   that has expired, one that is for servers alone, one of an authority below the accepted one
  //   that the client does not show
  // - with TLS 1.2
  // - with plain text, at once and after the handshake
  // - who stall: before the handshake, in its midst, before TLS and in its midst
  //
  // Returns which of them have been let in; "" for none. Those who stall stay until this ends.
  std::string Visit(uint16_t port, const Token& token);

  // Has the `i`-th of those come, alone, who have a certificate that is not accepted, or none; they
  // begin anew after the last one. Returns who has been let in, or "".
  std::string Come(int i, uint16_t port, const Token& token);

 private:
  // How many of these there are.
  static constexpr int kWrong = 6;

  CertificateFiles nobody_, strange_, unnamed_, expired_, server_, broken_;
  std::list<Socket> stalled_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_CERTIFICATE_STRANGERS_H_
