// A process in which OpenSSL makes no session of TLS, as where it finds no memory for one. Depend
// on it, and SSL_new() of the whole program can be made to fail.
#ifndef DISTGRAD_TESTS_TESTING_NO_TLS_H_
#define DISTGRAD_TESTS_TESTING_NO_TLS_H_

namespace distgrad {

// Lets no session be made in this process while it lives; those that there are go on. One at a
// time.
class NoTls {
 public:
  NoTls();
  ~NoTls();
  NoTls(const NoTls&) = delete;
  NoTls& operator=(const NoTls&) = delete;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_NO_TLS_H_
