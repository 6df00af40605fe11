// Values that hold tensors: a tensor, std::vector, std::array, std::map, std::pair, std::tuple and
// std::optional of them, in one another to any depth. The types stay the user's own, so what a
// module takes and returns is what its forward says. Anything else is a plain value, which is
// copied.
//
//   const std::vector<at::Tensor> flat = TensorsOf(batch);
//   const Batch same = WithTensors(batch, flat);
#ifndef DISTGRAD_CORE_TENSOR_NESTED_H_
#define DISTGRAD_CORE_TENSOR_NESTED_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace distgrad {

// How a type is walked over. kTensors: whether it holds tensors and nothing else. Visit calls
// f(const at::Tensor&) for each; Map makes the same of f's results; Alike says whether two have
// the same structure.
template <typename T>
struct Nested {
  static constexpr bool kTensors = false;
  template <typename F>
  static void Visit(const T&, F&) {}
  template <typename F>
  static T Map(const T& value, F&) {
    return value;
  }
  static bool Alike(const T&, const T&) { return true; }
};

template <>
struct Nested<at::Tensor> {
  static constexpr bool kTensors = true;
  template <typename F>
  static void Visit(const at::Tensor& tensor, F& f) {
    f(tensor);
  }
  template <typename F>
  static at::Tensor Map(const at::Tensor& tensor, F& f) {
    return f(tensor);
  }
  static bool Alike(const at::Tensor& a, const at::Tensor& b) { return a.defined() == b.defined(); }
};

template <typename T>
struct Nested<std::vector<T>> {
  static constexpr bool kTensors = Nested<T>::kTensors;
  template <typename F>
  static void Visit(const std::vector<T>& list, F& f) {
    for (const T& item : list) Nested<T>::Visit(item, f);
  }
  template <typename F>
  static std::vector<T> Map(const std::vector<T>& list, F& f) {
    std::vector<T> result;
    result.reserve(list.size());
    for (const T& item : list) result.push_back(Nested<T>::Map(item, f));
    return result;
  }
  static bool Alike(const std::vector<T>& a, const std::vector<T>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      if (!Nested<T>::Alike(a[i], b[i])) return false;
    }
    return true;
  }
};

template <typename T, size_t N>
struct Nested<std::array<T, N>> {
  static constexpr bool kTensors = Nested<T>::kTensors;
  template <typename F>
  static void Visit(const std::array<T, N>& array, F& f) {
    for (const T& item : array) Nested<T>::Visit(item, f);
  }
  template <typename F>
  static std::array<T, N> Map(const std::array<T, N>& array, F& f) {
    std::array<T, N> result = array;
    for (T& item : result) item = Nested<T>::Map(item, f);
    return result;
  }
  static bool Alike(const std::array<T, N>& a, const std::array<T, N>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), Nested<T>::Alike);
  }
};

template <typename K, typename T, typename Compare>
struct Nested<std::map<K, T, Compare>> {
  static constexpr bool kTensors = Nested<T>::kTensors;
  template <typename F>
  static void Visit(const std::map<K, T, Compare>& map, F& f) {
    for (const auto& [key, item] : map) Nested<T>::Visit(item, f);
  }
  template <typename F>
  static std::map<K, T, Compare> Map(const std::map<K, T, Compare>& map, F& f) {
    std::map<K, T, Compare> result(map.key_comp());
    for (const auto& [key, item] : map) result.emplace(key, Nested<T>::Map(item, f));
    return result;
  }
  static bool Alike(const std::map<K, T, Compare>& a, const std::map<K, T, Compare>& b) {
    if (a.size() != b.size()) return false;
    for (auto x = a.begin(), y = b.begin(); x != a.end(); ++x, ++y) {
      if (x->first != y->first || !Nested<T>::Alike(x->second, y->second)) return false;
    }
    return true;
  }
};

template <typename T>
struct Nested<std::optional<T>> {
  static constexpr bool kTensors = Nested<T>::kTensors;
  template <typename F>
  static void Visit(const std::optional<T>& value, F& f) {
    if (value.has_value()) Nested<T>::Visit(*value, f);
  }
  template <typename F>
  static std::optional<T> Map(const std::optional<T>& value, F& f) {
    if (!value.has_value()) return std::nullopt;
    return Nested<T>::Map(*value, f);
  }
  static bool Alike(const std::optional<T>& a, const std::optional<T>& b) {
    return a.has_value() == b.has_value() && (!a.has_value() || Nested<T>::Alike(*a, *b));
  }
};

template <typename... Ts>
struct Nested<std::tuple<Ts...>> {
  static constexpr bool kTensors = (Nested<Ts>::kTensors && ...);
  template <typename F>
  static void Visit(const std::tuple<Ts...>& tuple, F& f) {
    std::apply([&f](const Ts&... items) { (Nested<Ts>::Visit(items, f), ...); }, tuple);
  }
  template <typename F>
  static std::tuple<Ts...> Map(const std::tuple<Ts...>& tuple, F& f) {
    // Braces are evaluated from left to right.
    return std::apply(
        [&f](const Ts&... items) { return std::tuple<Ts...>{Nested<Ts>::Map(items, f)...}; },
        tuple);
  }
  static bool Alike(const std::tuple<Ts...>& a, const std::tuple<Ts...>& b) {
    return AlikeItems(a, b, std::index_sequence_for<Ts...>());
  }

 private:
  template <size_t... I>
  static bool AlikeItems(const std::tuple<Ts...>& a, const std::tuple<Ts...>& b,
                         std::index_sequence<I...>) {
    return (Nested<Ts>::Alike(std::get<I>(a), std::get<I>(b)) && ...);
  }
};

template <typename A, typename B>
struct Nested<std::pair<A, B>> {
  static constexpr bool kTensors = Nested<A>::kTensors && Nested<B>::kTensors;
  template <typename F>
  static void Visit(const std::pair<A, B>& pair, F& f) {
    Nested<A>::Visit(pair.first, f);
    Nested<B>::Visit(pair.second, f);
  }
  template <typename F>
  static std::pair<A, B> Map(const std::pair<A, B>& pair, F& f) {
    return std::pair<A, B>{Nested<A>::Map(pair.first, f), Nested<B>::Map(pair.second, f)};
  }
  static bool Alike(const std::pair<A, B>& a, const std::pair<A, B>& b) {
    return Nested<A>::Alike(a.first, b.first) && Nested<B>::Alike(a.second, b.second);
  }
};

// The tensors of `value`, in the order in which Visit and Map meet them.
template <typename T>
std::vector<at::Tensor> TensorsOf(const T& value) {
  std::vector<at::Tensor> tensors;
  const auto add = [&tensors](const at::Tensor& tensor) { tensors.push_back(tensor); };
  Nested<T>::Visit(value, add);
  return tensors;
}

// `value` with these tensors in the place of its own. Throws std::invalid_argument if they are not
// as many.
template <typename T>
T WithTensors(const T& value, const std::vector<at::Tensor>& tensors) {
  size_t count = 0;
  const auto add = [&count](const at::Tensor&) { ++count; };
  Nested<T>::Visit(value, add);
  if (tensors.size() != count) {
    throw std::invalid_argument(std::to_string(tensors.size()) +
                                " tensors are given for a value that holds " +
                                std::to_string(count));
  }
  size_t next = 0;
  const auto take = [&](const at::Tensor&) { return tensors[next++]; };
  return Nested<T>::Map(value, take);
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_NESTED_H_
