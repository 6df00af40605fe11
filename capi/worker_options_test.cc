// Certificates as options of C: each reaches its place, and the worker and its process groups use
// them.
#include "capi/worker_options.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/testing/certificates.h"

namespace distgrad {
namespace {

dg_str Str(const std::string& text) { return {text.data(), text.size()}; }

// "" where it went well.
std::string Said(dg_error* error) {
  if (error == nullptr) return "";
  const dg_str text = dg_error_message(error);
  const std::string said =
      absl::StrCat(dg_error_code(error), ": ", std::string(text.data, text.size));
  dg_error_destroy(error);
  return said;
}

TEST(WorkerOptionsTest, EachOptionOfTlsReachesItsPlace) {
  dg_tls_options tls = DG_TLS_OPTIONS_INIT;
  tls.cert = DG_STR("a certificate");
  tls.key = DG_STR("a key");
  tls.ca = DG_STR("authorities");
  tls.name = DG_STR("a name");
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.tls = &tls;
  for (const auto& [flags, encrypts] : {std::pair<uint64_t, std::optional<bool>>{0, std::nullopt},
                                        {DG_TLS_ENCRYPT_LOCAL, true},
                                        {DG_TLS_NO_ENCRYPT_LOCAL, false}}) {
    tls.flags = flags;
    const TlsOptions read = ToWorkerOptions(&options).value().tls;
    EXPECT_EQ(read.cert, "a certificate");
    EXPECT_EQ(read.key, "a key");
    EXPECT_EQ(read.ca, "authorities");
    EXPECT_EQ(read.name, "a name");
    EXPECT_EQ(read.encrypt_local, encrypts);
  }
}

// Without a key or a certificate this variable has a group refused.
TEST(WorkerOptionsTest, GroupsHaveTheCertificatesOfTheirWorkers) {
  setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS", 1);
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(absl::StrCat(folder, "/certificates"));
  const std::string rendezvous = absl::StrCat("file://", folder, "/workers");
  const CertificateFiles files[] = {authority.Issue("a", {.names = "DNS:job"}),
                                    authority.Issue("b", {.names = "DNS:job"})};
  std::thread threads[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads[rank] = std::thread([&, rank] {
      dg_tls_options tls = DG_TLS_OPTIONS_INIT;
      tls.cert = Str(files[rank].cert);
      tls.key = Str(files[rank].key);
      tls.ca = Str(files[rank].ca);
      tls.flags = DG_TLS_ENCRYPT_LOCAL;
      dg_worker_options options = DG_WORKER_OPTIONS_INIT;
      options.rank = rank;
      options.world_size = 2;
      options.rendezvous = Str(rendezvous);
      options.tls = &tls;
      dg_worker* worker = nullptr;
      ASSERT_EQ(Said(dg_worker_create(&options, &worker)), "");
      dg_process_group* group = nullptr;
      EXPECT_EQ(Said(dg_process_group_create(worker, nullptr, &group)), "");
      dg_process_group_destroy(group);
      EXPECT_EQ(Said(dg_worker_shutdown(worker, DG_FOREVER, 0)), "");
      dg_worker_destroy(worker);
    });
  }
  for (std::thread& thread : threads) thread.join();
  unsetenv("GLOO_DEVICE_TRANSPORT");
}

}  // namespace
}  // namespace distgrad
