#include "core/rpc/store/file_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "core/base/status.h"
#include "core/rpc/store/backoff.h"
#include "core/rpc/store/store_errors.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"

namespace distgrad {
namespace {

// Over c10d's, which throws, and whose get() waits with a lock held.
class FileStore final : public Store {
 public:
  FileStore(std::string path, c10::intrusive_ptr<c10d::FileStore> store)
      : path_(std::move(path)), store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    return Try("setting", key,
               [&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    Backoff backoff(deadline);
    do {
      bool there = false;
      std::vector<uint8_t> value;
      DG_RETURN_IF_ERROR(Try("getting", key, [&] {
        there = store_->check({key});
        if (there) value = store_->get(key);
      }));
      if (there) return std::string(value.begin(), value.end());
    } while (backoff.Sleep());
    return KeyDidNotCome(key, path_);
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    // c10d takes any text for a number.
    const auto before = Get(key, absl::InfinitePast());
    int64_t sum = 0;
    if (before.ok() && !absl::SimpleAtoi(*before, &sum)) return NotACounter(key);
    DG_RETURN_IF_ERROR(Try("adding to", key, [&] { sum = store_->add(key, amount); }));
    return sum;
  }

 private:
  template <typename Fn>
  absl::Status Try(absl::string_view doing, const std::string& key, Fn fn) {
    const auto failed = [&](absl::string_view why) {
      return absl::UnavailableError(
          absl::StrCat(doing, " \"", key, "\" in the store of ", path_, ": ", why));
    };
    try {
      fn();
      return absl::OkStatus();
    } catch (const c10::Error& e) {
      return failed(e.what_without_backtrace());
    } catch (const std::exception& e) {
      return failed(e.what());
    }
  }

  // Constant after construction; the store synchronizes itself.
  const std::string path_;
  const c10::intrusive_ptr<c10d::FileStore> store_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> NewFileStore(const std::string& path) {
  // c10d would go on trying for minutes.
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot open the store's file \"", path, "\": ", std::strerror(errno)));
  }
  close(fd);
  try {
    // -1: however many workers; then the file is never deleted.
    auto store = c10::make_intrusive<c10d::FileStore>(path, -1);
    store->setTimeout(std::chrono::seconds(10));  // if somebody deletes the file
    return std::make_unique<FileStore>(path, std::move(store));
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat("the store's file \"", path, "\": ", e.what()));
  }
}

}  // namespace distgrad
