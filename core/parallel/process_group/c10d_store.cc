// Has both adapters: ours over c10d's store, and c10d's over ours.
#include "core/parallel/process_group/c10d_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// Thread-safe, as c10d's stores are.
class FromC10d : public Store {
 public:
  explicit FromC10d(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline) override {
    return Call<Unit>(key,
                      [&] {
                        store_->set(key, value);
                        return Unit{};
                      })
        .status();
  }

  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override {
    const absl::Duration left = deadline.Left();
    return Call<std::string>(key, [&]() -> absl::StatusOr<std::string> {
      if (!store_->check({key})) {
        // A time-out of 0 would be none.
        if (left < absl::Milliseconds(1)) return NotThere(key);
        try {
          store_->wait({key}, absl::ToChronoMilliseconds(left));
        } catch (...) {
          // It counts in milliseconds.
          if (deadline.Left() <= absl::Milliseconds(1)) return NotThere(key);
          throw;
        }
      }
      return store_->get_to_str(key);
    });
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline) override {
    return Call<int64_t>(key, [&] { return store_->add(key, amount); });
  }

  absl::Status Delete(const std::string& key, Deadline) override {
    return Call<bool>(key, [&] { return store_->deleteKey(key); }).status();
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline) override {
    std::vector<Value> values;
    for (const std::string& key : keys) {
      const auto get = [&]() -> absl::StatusOr<Value> {
        if (!store_->check({key})) return Value();
        return Value(store_->get_to_str(key));
      };
      DG_ASSIGN_OR_RETURN(Value value, Call<Value>(key, get));
      values.push_back(std::move(value));
    }
    return values;
  }

 private:
  struct Unit {};

  static absl::Status NotThere(const std::string& key) {
    return absl::NotFoundError(absl::StrCat("key '", key, "' is not in c10d's store"));
  }

  template <typename T, typename F>
  static absl::StatusOr<T> Call(const std::string& key, const F& call) {
    try {
      return call();
    } catch (...) {
      return Annotate(StatusFromException(std::current_exception()),
                      absl::StrCat("key '", key, "' of c10d's store"));
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

// Thread-safe, as our stores are.
class ToC10d : public c10d::Store {
 public:
  ToC10d(std::shared_ptr<distgrad::Store> store, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), store_(std::move(store)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<ToC10d>(store_, timeout_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const absl::Status status =
        store_->Set(key, std::string(value.begin(), value.end()), UntilTimeout());
    if (!status.ok()) throw StatusError(status);
  }
  std::vector<uint8_t> get(const std::string& key) override { return Get(key, timeout_); }
  int64_t add(const std::string& key, int64_t value) override {
    return ValueOrThrow(store_->Add(key, value, UntilTimeout()));
  }
  bool deleteKey(const std::string& key) override {
    const auto before = ValueOrThrow(store_->GetEach({key}, UntilTimeout()));
    const absl::Status status = store_->Delete(key, UntilTimeout());
    if (!status.ok()) throw StatusError(status);
    return before[0].has_value();
  }
  bool check(const std::vector<std::string>& keys) override {
    const auto values = ValueOrThrow(store_->GetEach(keys, UntilTimeout()));
    return std::all_of(values.begin(), values.end(),
                       [](const distgrad::Store::Value& value) { return value.has_value(); });
  }
  int64_t getNumKeys() override {
    throw StatusError(absl::UnimplementedError("this store does not count its keys"));
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    for (const std::string& key : keys) Get(key, timeout);
  }

 private:
  Deadline UntilTimeout() const { return Deadline::After(absl::FromChrono(timeout_)); }

  std::vector<uint8_t> Get(const std::string& key, std::chrono::milliseconds timeout) {
    const auto value = store_->Get(key, Deadline::After(absl::FromChrono(timeout)));
    // c10d knows a time-out alone.
    if (absl::IsNotFound(value.status())) {
      throw StatusError(absl::DeadlineExceededError(value.status().message()));
    }
    const std::string bytes = ValueOrThrow(value);
    return {bytes.begin(), bytes.end()};
  }

  const std::shared_ptr<distgrad::Store> store_;
};

}  // namespace

std::shared_ptr<Store> StoreOfC10d(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_shared<FromC10d>(std::move(store));
}

c10::intrusive_ptr<c10d::Store> C10dStoreOf(std::shared_ptr<Store> store, absl::Duration timeout) {
  return c10::make_intrusive<ToC10d>(std::move(store), absl::ToChronoMilliseconds(timeout));
}

}  // namespace distgrad
