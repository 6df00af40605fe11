// Certificates that a test makes for itself, of an authority of its own.
#ifndef DISTGRAD_TESTS_TESTING_CERTIFICATES_H_
#define DISTGRAD_TESTS_TESTING_CERTIFICATES_H_

#include <memory>
#include <string>

#include "core/net/certificates.h"

namespace distgrad {

// Aborts where OpenSSL fails. For one thread at a time.
class TestAuthority {
 public:
  // Writes its files below `folder`, which is there.
  explicit TestAuthority(std::string folder);
  ~TestAuthority();

  struct Request {
    // subjectAltName as OpenSSL's configuration has it: "DNS:a,IP:10.0.0.1,URI:spiffe://b/c"; "":
    // none.
    std::string names;
    // From a day ago until so many days from now; negative: it has expired.
    int days = 1;
    // extendedKeyUsage as OpenSSL's configuration has it: "clientAuth"; "": none.
    std::string use = {};
    // There is another authority between this one and the certificate, which its file lacks.
    bool lacks_chain = false;
  };
  // Issues a certificate with a key of its own, and writes both; over what was there under this
  // name, as an agent that rotates them does.
  CertificateFiles Issue(const std::string& file, const Request& request);

 private:
  struct Library;

  const std::string folder_;
  const std::unique_ptr<Library> library_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_CERTIFICATES_H_
