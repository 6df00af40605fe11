// Shows, compares, merges and splits checkpoints: tools/bazel run //tools:checkpoint -- --help
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/flatten.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/checkpoint/job/json_text.h"
#include "core/checkpoint/job/manifest.h"
#include "core/checkpoint/job/shard.h"
#include "core/checkpoint/job/step_folders.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/tensor/exception.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

namespace fs = std::filesystem;

constexpr char kHelp[] =
    R"(usage: checkpoint show PATH            what is in it; checks all checksums of a checkpoint
       checkpoint diff PATH PATH       which tensors differ, and by how much, and which options of
                                       optimizers; ends with 1 if any does
       checkpoint merge PATH FILE      all parameters and buffers of a checkpoint into one file
       checkpoint split PATH N FOLDER  its parameters and buffers into N files of about one size

PATH is a safetensors file, the folder of one checkpoint (step-000100), or a folder of checkpoints,
which stands for the newest of them, and is an error if a manifest in it cannot be read.
)";

// As its user means it: `bazel run` changes the working folder and tells the old one.
std::string FromUsersFolder(const std::string& path) {
  const char* folder = getenv("BUILD_WORKING_DIRECTORY");
  const fs::path base = folder != nullptr ? fs::path(folder) : fs::current_path();
  std::string text = (base / path).lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

// Tensors of one or several files, by their names; those of optimizers as "optimizer NAME: ...".
struct Tensors {
  struct Where {
    const SafetensorsFile* file;
    std::string name;  // in the file
    std::optional<uint32_t> checksum;

    const SafetensorsInfo& info() const { return file->header().tensors.at(name); }
  };
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Where> parameters;
  std::map<std::string, Where> optimizers;
  // Whose they are is before each: "optimizer NAME"; "optimizer" for a file that is not of a job.
  std::vector<std::pair<std::string, const SafetensorsFile*>> optimizer_files;
  std::optional<Manifest> manifest;
  std::string path;
};

absl::StatusOr<Tensors> Open(const std::string& given) {
  Tensors tensors;
  tensors.path = FromUsersFolder(given);
  const auto add = [&](const std::string& path, const ManifestFile* of) -> absl::Status {
    DG_ASSIGN_OR_RETURN(SafetensorsFile file,
                        of == nullptr ? SafetensorsFile::Open(path) : OpenShard(tensors.path, *of));
    tensors.files.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
    const SafetensorsFile* const opened = tensors.files.back().get();
    if (of != nullptr && of->optimizer.has_value()) {
      tensors.optimizer_files.emplace_back(absl::StrCat("optimizer ", *of->optimizer), opened);
    } else if (of == nullptr && opened->header().metadata.count("param_groups") > 0) {
      tensors.optimizer_files.emplace_back("optimizer", opened);
    }
    for (const auto& [name, info] : opened->header().tensors) {
      std::optional<uint32_t> sum;
      if (of != nullptr) sum = of->checksums.tensors.at(name);
      if (of != nullptr && of->optimizer.has_value()) {
        tensors.optimizers[absl::StrCat("optimizer ", *of->optimizer, ": ", name)] = {opened, name,
                                                                                      sum};
      } else {
        tensors.parameters[name] = {opened, name, sum};
      }
    }
    return absl::OkStatus();
  };
  if (!fs::is_directory(tensors.path)) {
    DG_RETURN_IF_ERROR(add(tensors.path, nullptr));
    return tensors;
  }
  if (!fs::exists(tensors.path + "/" + kManifestName)) {
    DG_ASSIGN_OR_RETURN(const std::vector<StepFolder> steps, ListSteps(tensors.path));
    if (steps.empty()) {
      return absl::NotFoundError(absl::StrCat(tensors.path, " is no checkpoint, and has none"));
    }
    // One whose manifest is not read does not say when it was saved: it may be the newest.
    for (const StepFolder& step : steps) {
      if (step.manifest.ok()) continue;
      return absl::Status(step.manifest.status().code(),
                          absl::StrCat(step.manifest.status().message(),
                                       "; so it is not known which is the newest in ", tensors.path,
                                       ": give the folder of one step"));
    }
    tensors.path = steps[0].path;
  }
  DG_ASSIGN_OR_RETURN(tensors.manifest, ReadManifest(tensors.path));
  for (const ManifestWorker& worker : tensors.manifest->workers) {
    for (const ManifestFile& file : worker.files) {
      DG_RETURN_IF_ERROR(add(absl::StrCat(tensors.path, "/", file.name), &file));
    }
  }
  return tensors;
}

std::string TypeText(const SafetensorsInfo& info) {
  return absl::StrCat(SafetensorsDtype(info.dtype), " [", absl::StrJoin(info.shape, ", "), "]");
}

// For people, and for one line.
std::string Printable(const std::string& value) {
  constexpr size_t kMost = 100;
  return value.size() <= kMost ? QuoteName(value) : absl::StrCat(value.size(), " bytes");
}

absl::Status Show(const std::string& path) {
  const std::string folder = FromUsersFolder(path);
  if (fs::is_directory(folder) && !fs::exists(folder + "/" + kManifestName)) {
    DG_ASSIGN_OR_RETURN(const std::vector<StepFolder> steps, ListSteps(folder));
    for (const StepFolder& step : steps) {
      std::printf("%s  %s\n", step.path.c_str(),
                  step.manifest.ok() ? absl::StrCat("step ", step.manifest->step, ", saved ",
                                                    QuoteName(step.manifest->time))
                                           .c_str()
                                     : std::string(step.manifest.status().message()).c_str());
    }
  }
  DG_ASSIGN_OR_RETURN(const Tensors tensors, Open(path));
  std::printf("%s\n", tensors.path.c_str());
  if (tensors.manifest.has_value()) {
    std::printf("step %lld, saved %s\n", static_cast<long long>(tensors.manifest->step),
                QuoteName(tensors.manifest->time).c_str());
    for (const ManifestWorker& worker : tensors.manifest->workers) {
      std::printf("worker %s\n", QuoteName(worker.name).c_str());
      for (const ManifestFile& file : worker.files) {
        std::printf("  %s  %llu bytes, %zu tensors\n", file.name.c_str(),
                    static_cast<unsigned long long>(file.checksums.size),
                    file.checksums.tensors.size());
      }
      for (const auto& [name, value] : worker.values) {
        std::printf("  %s = %s\n", QuoteName(name).c_str(), Printable(value).c_str());
      }
    }
  } else {
    for (const auto& [name, value] : tensors.files[0]->header().metadata) {
      std::printf("%s = %s\n", QuoteName(name).c_str(), Printable(value).c_str());
    }
  }
  int64_t numbers = 0;
  for (const auto* each : {&tensors.parameters, &tensors.optimizers}) {
    for (const auto& [name, where] : *each) {
      std::printf("%-40s %s\n", QuoteName(name).c_str(), TypeText(where.info()).c_str());
      int64_t count = 1;
      for (const int64_t size : where.info().shape) count *= size;
      if (each == &tensors.parameters) numbers += count;
      if (!where.checksum.has_value()) continue;
      DG_ASSIGN_OR_RETURN(const uint32_t sum, where.file->Checksum(where.name));
      if (sum != *where.checksum) {
        return absl::DataLossError(absl::StrCat(tensors.path, " is damaged: the checksum of ",
                                                QuoteName(name), " is wrong"));
      }
    }
  }
  std::printf("%zu tensors of %lld elements%s\n", tensors.parameters.size(),
              static_cast<long long>(numbers),
              tensors.manifest.has_value() ? "; all checksums are right" : "");
  return absl::OkStatus();
}

// The options of each optimizer's parameters, as text. Which of them are together in a group, and
// in a file, depends on the workers.
absl::StatusOr<std::map<std::string, std::string>> OptionsIn(const Tensors& tensors) {
  std::map<std::string, std::string> options;
  for (const auto& [optimizer, file] : tensors.optimizer_files) {
    std::map<std::string, std::string> metadata = file->header().metadata;
    DG_ASSIGN_OR_RETURN(const nlohmann::json groups, ParseJson(metadata["param_groups"]));
    for (nlohmann::json group : groups) {
      const auto names = group.at("param_names").get<std::vector<std::string>>();
      group.erase("param_names");
      group.erase("params");
      for (const std::string& name : names) {
        options[absl::StrCat(optimizer, ": ", name)] =
            absl::StrCat(metadata["optimizer"], " ", group.dump());
      }
    }
  }
  return options;
}

// Which elements, in a row, have other bytes. Numbers do not say it: -0 equals 0, and no NaN
// itself.
at::Tensor WhereBytesDiffer(const at::Tensor& left, const at::Tensor& right) {
  const at::Tensor differ = at::empty({left.numel()}, at::kBool);
  const size_t size = left.element_size();
  const auto* const a = static_cast<const char*>(left.const_data_ptr());
  const auto* const b = static_cast<const char*>(right.const_data_ptr());
  bool* const to = differ.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < left.numel(); ++i) to[i] = memcmp(a + i * size, b + i * size, size) != 0;
  return differ;
}

// How far apart they are, as doubles.
at::Tensor Distances(const at::Tensor& left, const at::Tensor& right) {
  const at::ScalarType wide = left.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor distances = (left.to(wide) - right.to(wide)).abs();
  if (!at::isIntegralType(left.scalar_type(), /*includeBool=*/true)) return distances;
  // A double has not all of them, and a difference of far ones has no room.
  constexpr double kNear = int64_t{1} << 53;
  return at::where(distances.lt(kNear), (left.to(at::kLong) - right.to(at::kLong)).abs(),
                   distances);
}

// Whether they are the same.
absl::StatusOr<bool> Diff(const std::string& a_path, const std::string& b_path) {
  DG_ASSIGN_OR_RETURN(const Tensors a, Open(a_path));
  DG_ASSIGN_OR_RETURN(const Tensors b, Open(b_path));
  bool same = true;
  const auto say = [&](const std::string& name, const std::string& what) {
    same = false;
    std::printf("%s %s\n", QuoteName(name).c_str(), what.c_str());
  };
  const auto compare = [&](const std::map<std::string, Tensors::Where>& ones,
                           const std::map<std::string, Tensors::Where>& others) -> absl::Status {
    for (const auto& [name, one] : ones) {
      const auto other = others.find(name);
      if (other == others.end()) {
        say(name, "is only in the first");
        continue;
      }
      const SafetensorsInfo &x = one.info(), &y = other->second.info();
      if (x.dtype != y.dtype || x.shape != y.shape) {
        say(name, absl::StrCat("is ", TypeText(x), " and ", TypeText(y)));
        continue;
      }
      DG_ASSIGN_OR_RETURN(const uint32_t x_sum, one.file->Checksum(one.name));
      DG_ASSIGN_OR_RETURN(const uint32_t y_sum, other->second.file->Checksum(other->second.name));
      if (x_sum == y_sum) continue;
      DG_ASSIGN_OR_RETURN(const at::Tensor left, one.file->Read(one.name));
      DG_ASSIGN_OR_RETURN(const at::Tensor right, other->second.file->Read(other->second.name));
      const at::Tensor differ = WhereBytesDiffer(left, right);
      const at::Tensor distances = Distances(left, right).flatten().masked_select(differ);
      say(name, absl::StrFormat("differs in %d of %d elements, by %g at most", distances.numel(),
                                differ.numel(), distances.max().item<double>()));
    }
    for (const auto& [name, other] : others) {
      if (ones.count(name) == 0) say(name, "is only in the second");
    }
    return absl::OkStatus();
  };
  DG_RETURN_IF_ERROR(compare(a.parameters, b.parameters));
  // A file has no more that a checkpoint could be compared with.
  if (a.manifest.has_value() == b.manifest.has_value()) {
    DG_RETURN_IF_ERROR(compare(a.optimizers, b.optimizers));
    DG_ASSIGN_OR_RETURN(const auto ones, OptionsIn(a));
    DG_ASSIGN_OR_RETURN(const auto others, OptionsIn(b));
    for (const auto& [name, options] : ones) {
      const auto other = others.find(name);
      if (other == others.end()) {
        say(name, "has options only in the first");
      } else if (other->second != options) {
        say(name, absl::StrCat("has the options ", options, " and ", other->second));
      }
    }
    for (const auto& [name, options] : others) {
      if (ones.count(name) == 0) say(name, "has options only in the second");
    }
  }
  if (a.manifest.has_value() && b.manifest.has_value()) {
    std::map<std::string, std::map<std::string, std::string>> values[2];
    for (const ManifestWorker& worker : a.manifest->workers) {
      if (!worker.values.empty()) values[0][worker.name] = worker.values;
    }
    for (const ManifestWorker& worker : b.manifest->workers) {
      if (!worker.values.empty()) values[1][worker.name] = worker.values;
    }
    if (values[0] != values[1]) {
      same = false;
      std::printf("the values of the workers differ\n");
    }
  }
  if (same) std::printf("they are the same\n");
  return same;
}

// Of a file of an optimizer there would be its tensors, and not its options.
absl::StatusOr<Tensors> OpenParameters(const std::string& path) {
  DG_ASSIGN_OR_RETURN(Tensors tensors, Open(path));
  if (tensors.manifest.has_value() || tensors.optimizer_files.empty()) return tensors;
  return absl::InvalidArgumentError(
      absl::StrCat(tensors.path, " is the file of an optimizer, and has no parameters"));
}

absl::StatusOr<TensorMap> ReadParameters(const Tensors& from, const std::set<std::string>* only) {
  TensorMap read;
  for (const auto& [name, where] : from.parameters) {
    if (only != nullptr && only->count(name) == 0) continue;
    if (where.checksum.has_value()) {
      DG_ASSIGN_OR_RETURN(const uint32_t sum, where.file->Checksum(where.name));
      if (sum != *where.checksum) {
        return absl::DataLossError(
            absl::StrCat(from.path, " is damaged: the checksum of ", QuoteName(name), " is wrong"));
      }
    }
    DG_ASSIGN_OR_RETURN(read[name], where.file->Read(where.name));
  }
  return read;
}

absl::Status Merge(const std::string& path, const std::string& file) {
  DG_ASSIGN_OR_RETURN(const Tensors from, OpenParameters(path));
  DG_ASSIGN_OR_RETURN(const TensorMap tensors, ReadParameters(from, nullptr));
  return SaveSafetensors(tensors, FromUsersFolder(file), {{"format", "pt"}});
}

absl::Status Split(const std::string& path, int count, const std::string& to) {
  DG_ASSIGN_OR_RETURN(const Tensors from, OpenParameters(path));
  const std::string folder = FromUsersFolder(to);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("making ", folder));
  std::vector<std::pair<uint64_t, std::string>> by_size;
  for (const auto& [name, where] : from.parameters) {
    by_size.emplace_back(where.info().end - where.info().begin, name);
  }
  std::sort(by_size.rbegin(), by_size.rend());
  std::vector<std::pair<uint64_t, std::set<std::string>>> parts(count);
  for (const auto& [size, name] : by_size) {
    auto& least = *std::min_element(parts.begin(), parts.end(),
                                    [](const auto& a, const auto& b) { return a.first < b.first; });
    least.first += size;
    least.second.insert(name);
  }
  for (int i = 0; i < count; ++i) {
    DG_ASSIGN_OR_RETURN(const TensorMap tensors, ReadParameters(from, &parts[i].second));
    DG_RETURN_IF_ERROR(SaveSafetensors(
        tensors, absl::StrFormat("%s/model-%05d-of-%05d.safetensors", folder, i + 1, count),
        {{"format", "pt"}}));
  }
  return absl::OkStatus();
}

int Main(const std::vector<std::string>& arguments) {
  const auto is = [&](const char* command, size_t count) {
    return arguments.size() == count + 1 && arguments[0] == command;
  };
  absl::Status status;
  int count = 0;
  if (is("show", 1)) {
    status = Show(arguments[1]);
  } else if (is("diff", 2)) {
    const absl::StatusOr<bool> same = Diff(arguments[1], arguments[2]);
    if (same.ok()) return *same ? 0 : 1;
    status = same.status();
  } else if (is("merge", 2)) {
    status = Merge(arguments[1], arguments[2]);
  } else if (is("split", 3) && absl::SimpleAtoi(arguments[2], &count) && count >= 1 &&
             count <= 99'999) {
    status = Split(arguments[1], count, arguments[3]);
  } else {
    const bool asked = arguments.size() == 1 && arguments[0] == "--help";
    std::fputs(kHelp, asked ? stdout : stderr);
    return asked ? 0 : 2;
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "checkpoint: %s\n", std::string(status.message()).c_str());
  return 2;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  try {
    const at::NoGradGuard no_grad;
    return distgrad::Main(std::vector<std::string>(argv + 1, argv + argc));
  } catch (...) {
    const absl::Status status = distgrad::StatusFromException(std::current_exception());
    std::fprintf(stderr, "checkpoint: %s\n", std::string(status.message()).c_str());
    return 2;
  }
}
