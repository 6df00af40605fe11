// Converts the state of an optimizer as tensors with names (core/optim/optimizer_state.h) to a file
// and back, which has the parameters' state as tensors and the groups' options as JSON, each in the
// words of PyTorch's state_dict().
#include "core/checkpoint/optimizer_checkpoint.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/base/error_list.h"
#include "core/base/status.h"
#include "core/checkpoint/state_name.h"
#include "core/optim/optimizer_state.h"
#include "core/tensor/exception.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;
using Strings = std::vector<std::string>;
using torch::optim::Optimizer;

constexpr char kOptimizer[] = "optimizer";
constexpr char kParamGroups[] = "param_groups";
constexpr char kParamNames[] = "param_names";

// What stands in groups of PyTorch's that libtorch has no option for, and does not change what is
// computed: which kernels run, and what a schedule of the learning rate began with.
constexpr absl::string_view kIgnored[] = {"params",         "foreach", "capturable",
                                          "differentiable", "fused",   "initial_lr"};

std::string Quoted(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) quoted.push_back(QuoteName(name));
  return FirstOf(quoted);
}

// The names of an optimizer's parameters. A parameter that has several, as tied weights do, goes by
// the first of them.
class Names {
 public:
  explicit Names(const TensorMap& parameters) {
    for (const auto& [name, tensor] : parameters) {
      if (!tensor.defined()) continue;
      canonical_[name] = names_.emplace(tensor.unsafeGetTensorImpl(), name).first->second;
    }
  }

  // By groups. kInvalidArgument if one has none, or is there twice.
  absl::StatusOr<std::vector<Strings>> Of(const Optimizer& optimizer) const {
    std::vector<Strings> groups;
    std::set<std::string> seen;
    for (const auto& group : optimizer.param_groups()) {
      groups.emplace_back();
      for (const at::Tensor& parameter : group.params()) {
        const auto found = names_.find(parameter.unsafeGetTensorImpl());
        if (found == names_.end()) {
          return absl::InvalidArgumentError(absl::StrCat(
              "parameter ", seen.size(), " of the optimizer, of shape [",
              absl::StrJoin(parameter.sizes(), ", "), "], is none of those that have a name"));
        }
        if (!seen.insert(found->second).second) {
          return absl::InvalidArgumentError(
              absl::StrCat("the optimizer has ", QuoteName(found->second), " twice"));
        }
        groups.back().push_back(found->second);
      }
    }
    return groups;
  }

  // The one that a parameter goes by. Names of none stay as they are.
  std::string Canonical(const std::string& name) const {
    const auto found = canonical_.find(name);
    return found == canonical_.end() ? name : found->second;
  }

 private:
  std::map<const c10::TensorImpl*, std::string> names_;
  std::map<std::string, std::string> canonical_;
};

StateForm FormOf(const std::vector<Strings>& groups, bool copy) {
  StateForm form{{}, copy};
  for (const Strings& names : groups)
    form.names.insert(form.names.end(), names.begin(), names.end());
  return form;
}

// An option as JSON, as Python writes it; undefined numbers are none.
absl::StatusOr<Json> OptionToJson(const StateTensor& option) {
  const at::Tensor flat = option.tensor.reshape({-1});
  if (flat.scalar_type() == at::kBool) return Json(flat[0].item<bool>());
  std::vector<double> numbers;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    numbers.push_back(flat[i].item<double>());
    if (!std::isfinite(numbers.back())) {
      return absl::InvalidArgumentError(absl::StrCat(option.name, " is ", numbers.back()));
    }
  }
  return option.tensor.dim() == 0 ? Json(numbers[0]) : Json(numbers);
}

// Back. Undefined if that is no option.
at::Tensor OptionFromJson(const Json& value) {
  if (value.is_boolean()) return at::scalar_tensor(value.get<bool>(), at::kBool);
  if (value.is_number()) return at::scalar_tensor(value.get<double>(), at::kDouble);
  if (!value.is_array()) return at::Tensor();
  std::vector<double> numbers;
  for (const Json& each : value) {
    if (!each.is_number()) return at::Tensor();
    numbers.push_back(each.get<double>());
  }
  return at::tensor(numbers, at::kDouble);
}

absl::StatusOr<OptimizerSnapshot> Snapshot(Optimizer& optimizer, const TensorMap& parameters,
                                           bool copy, const std::set<std::string>* only) {
  const auto has = [only](const std::string& name) { return only == nullptr || only->count(name); };
  DG_ASSIGN_OR_RETURN(const std::string name, OptimizerName(optimizer));
  DG_ASSIGN_OR_RETURN(const std::vector<Strings> groups, Names(parameters).Of(optimizer));
  DG_ASSIGN_OR_RETURN(std::vector<StateTensor> state, ReadState(optimizer, FormOf(groups, copy)));
  Json options = Json::array();
  size_t number = 0;
  for (const Strings& names : groups) {
    Json group = {{"params", Json::array()}, {kParamNames, Json::array()}};
    for (const std::string& each : names) {
      if (!has(each)) continue;
      group["params"].push_back(number++);
      group[kParamNames].push_back(each);
    }
    options.push_back(std::move(group));
  }
  // What a load would refuse is said while there is still the optimizer that has it.
  StateForm check = FormOf(groups, /*copy=*/false);
  check.check_only = true;
  DG_RETURN_IF_ERROR(Annotate(LoadState(state, &optimizer, check), "it could not be loaded again"));
  OptimizerSnapshot snapshot;
  for (StateTensor& each : state) {
    absl::string_view rest = each.name;
    if (absl::ConsumePrefix(&rest, "param_groups.")) {
      const size_t dot = rest.find('.');
      const size_t group = std::stoul(std::string(rest.substr(0, dot)));
      DG_ASSIGN_OR_RETURN(options[group][std::string(rest.substr(dot + 1))], OptionToJson(each));
      continue;
    }
    const std::optional<StateName> of = ParseStateName(each.name);
    if (of.has_value() && !has(of->parameter)) continue;
    // PyTorch counts steps in float32, which has all integers up to here.
    constexpr int64_t kMostOfFloat = 1 << 24;
    if (absl::EndsWith(each.name, ".step") && each.tensor.item<int64_t>() <= kMostOfFloat) {
      each.tensor = each.tensor.to(at::kFloat);
    }
    snapshot.tensors[each.name] = std::move(each.tensor);
  }
  if (only != nullptr) {
    const auto is_empty = [](const Json& group) { return group[kParamNames].empty(); };
    options.erase(std::remove_if(options.begin(), options.end(), is_empty), options.end());
  }
  snapshot.metadata = {{"format", "pt"}, {kOptimizer, name}};
  try {
    snapshot.metadata[kParamGroups] = options.dump();
  } catch (const Json::exception&) {
    return absl::InvalidArgumentError("the name of a parameter is not UTF-8");
  }
  return snapshot;
}

absl::StatusOr<OptimizerSnapshot> TrySnapshot(Optimizer& optimizer, const TensorMap& parameters,
                                              bool copy,
                                              const std::set<std::string>* only = nullptr) {
  try {
    return Snapshot(optimizer, parameters, copy, only);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

// A group in a file.
struct FileGroup {
  Strings names;  // as the parameters here go by, sorted
  Json options;
};

absl::StatusOr<std::vector<FileGroup>> ParseGroups(const std::string& text, const Names& names) {
  // A list of objects of lists, and nothing deeper: what is deep takes much more memory than text.
  bool too_deep = false;
  const Json json = Json::parse(
      text,
      [&](int depth, Json::parse_event_t event, Json&) {
        const bool begins =
            event == Json::parse_event_t::array_start || event == Json::parse_event_t::object_start;
        too_deep |= begins && depth > 2;
        return !too_deep;
      },
      /*allow_exceptions=*/false);
  if (too_deep || !json.is_array()) {
    return absl::InvalidArgumentError("its metadata's param_groups are no list of groups in JSON");
  }
  std::vector<FileGroup> groups;
  std::set<std::string> seen;
  for (const Json& group : json) {
    const std::string where = absl::StrCat("its param_groups[", groups.size(), "] ");
    const auto listed = group.find(kParamNames);
    if (listed == group.end() || !listed->is_array()) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, "has no param_names: docs/checkpoints.md says how Python writes them"));
    }
    groups.push_back({{}, group});
    for (const Json& name : *listed) {
      if (!name.is_string()) {
        return absl::InvalidArgumentError(absl::StrCat(where, "has a name that is no string"));
      }
      groups.back().names.push_back(names.Canonical(name.get<std::string>()));
      if (!seen.insert(groups.back().names.back()).second) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, "has ", QuoteName(groups.back().names.back()), " again"));
      }
    }
    groups.back().options.erase(kParamNames);
    std::sort(groups.back().names.begin(), groups.back().names.end());
  }
  return groups;
}

// The file's group of each of ours: the one with the same parameters.
absl::StatusOr<std::vector<const FileGroup*>> MatchGroups(const std::vector<FileGroup>& theirs,
                                                          const std::vector<Strings>& ours) {
  std::set<std::string> here, there;
  std::multimap<Strings, const FileGroup*> by_names;
  for (const FileGroup& group : theirs) {
    there.insert(group.names.begin(), group.names.end());
    by_names.emplace(group.names, &group);
  }
  for (const Strings& names : ours) here.insert(names.begin(), names.end());
  Strings missing, unexpected;
  std::set_difference(here.begin(), here.end(), there.begin(), there.end(),
                      std::back_inserter(missing));
  std::set_difference(there.begin(), there.end(), here.begin(), here.end(),
                      std::back_inserter(unexpected));
  if (!missing.empty() || !unexpected.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it has other parameters than the optimizer:",
        missing.empty() ? "" : absl::StrCat(" missing are ", Quoted(missing)),
        missing.empty() || unexpected.empty() ? "" : ";",
        unexpected.empty() ? "" : absl::StrCat(" unexpected are ", Quoted(unexpected))));
  }
  std::vector<const FileGroup*> matched;
  for (Strings names : ours) {
    std::sort(names.begin(), names.end());
    const auto found = by_names.find(names);
    if (found == by_names.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("none of its groups has the parameters of the optimizer's group ",
                       matched.size(), ", which are ", Quoted(names)));
    }
    matched.push_back(found->second);
    by_names.erase(found);
  }
  // All parameters are matched: what is left has none.
  if (!by_names.empty()) {
    return absl::InvalidArgumentError("it has a group without parameters that the optimizer lacks");
  }
  return matched;
}

// Appends the options of a group, as those of our group number `number`.
absl::Status AppendOptions(const Json& options, size_t number, const std::string& optimizer,
                           std::vector<StateTensor>* state) {
  const std::string where = absl::StrCat("its param_groups.", number, ".");
  for (const auto& [key, value] : options.items()) {
    if (std::count(std::begin(kIgnored), std::end(kIgnored), key) > 0) continue;
    if (key == "maximize" && (value == false || value.is_null())) continue;
    if (key == "maximize") {
      return absl::InvalidArgumentError(
          absl::StrCat(where, "maximize is not false, and libtorch only minimizes"));
    }
    if (key == "decoupled_weight_decay") {  // which makes Python's Adam to AdamW
      if (value == (optimizer == "AdamW")) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          where, "decoupled_weight_decay is not that of ", optimizer, " (true is AdamW's)"));
    }
    const at::Tensor tensor = IsStateWord(key) ? OptionFromJson(value) : at::Tensor();
    if (!tensor.defined()) {
      return absl::InvalidArgumentError(absl::StrCat(where, QuoteName(key), " is no option"));
    }
    state->push_back({absl::StrCat("param_groups.", number, ".", key), tensor});
  }
  return absl::OkStatus();
}

// What a file has: the name of the optimizer's class, and its groups.
struct FileGroups {
  std::string kind;
  std::vector<FileGroup> groups;
};

absl::StatusOr<FileGroups> GroupsOf(const SafetensorsFile& file, const Names& names) {
  const auto& metadata = file.header().metadata;
  const auto kind = metadata.find(kOptimizer), groups = metadata.find(kParamGroups);
  if (kind == metadata.end() || groups == metadata.end()) {
    return absl::InvalidArgumentError(
        "it is not the state of an optimizer: its metadata lack \"optimizer\" or \"param_groups\"");
  }
  DG_ASSIGN_OR_RETURN(std::vector<FileGroup> parsed, ParseGroups(groups->second, names));
  return FileGroups{kind->second, std::move(parsed)};
}

absl::Status CheckKind(const FileGroups& groups, const std::string& name) {
  if (groups.kind == name) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("it is of the optimizer ", QuoteName(groups.kind), ", and this is ", name));
}

absl::Status Load(const SafetensorsFile& file, const TensorMap& parameters, Optimizer* optimizer) {
  DG_ASSIGN_OR_RETURN(const std::string name, OptimizerName(*optimizer));
  const Names names(parameters);
  DG_ASSIGN_OR_RETURN(const std::vector<Strings> ours, names.Of(*optimizer));
  DG_ASSIGN_OR_RETURN(const FileGroups theirs, GroupsOf(file, names));
  DG_RETURN_IF_ERROR(CheckKind(theirs, name));
  DG_ASSIGN_OR_RETURN(const std::vector<const FileGroup*> matched,
                      MatchGroups(theirs.groups, ours));
  std::vector<StateTensor> state;
  for (size_t i = 0; i < matched.size(); ++i) {
    DG_RETURN_IF_ERROR(AppendOptions(matched[i]->options, i, name, &state));
  }
  const StateForm form = FormOf(ours, /*copy=*/false);  // what was read is nobody else's
  const std::set<absl::string_view> known(form.names.begin(), form.names.end());
  for (const auto& [key, info] : file.header().tensors) {
    std::optional<StateName> of = ParseStateName(key);
    if (of.has_value()) of->parameter = names.Canonical(of->parameter);
    if (!of.has_value() || known.count(of->parameter) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "it has a tensor ", QuoteName(key), ", which is no state of the optimizer's parameters"));
    }
    DG_ASSIGN_OR_RETURN(at::Tensor tensor, file.Read(key));
    state.push_back({of->Text(), std::move(tensor)});
  }
  return LoadState(state, optimizer, form);
}

using ReadTensor = std::function<absl::StatusOr<at::Tensor>(size_t file, const std::string& name)>;

absl::StatusOr<OptimizerParts> Collect(const std::vector<const SafetensorsFile*>& files,
                                       const TensorMap& parameters, Optimizer& optimizer,
                                       const ReadTensor& read) {
  DG_ASSIGN_OR_RETURN(const std::string name, OptimizerName(optimizer));
  const Names names(parameters);
  DG_ASSIGN_OR_RETURN(const std::vector<Strings> ours, names.Of(optimizer));
  // Where each parameter is.
  std::vector<FileGroups> groups;
  std::map<std::string, std::pair<size_t, const FileGroup*>> found;
  for (const SafetensorsFile* file : files) {
    DG_ASSIGN_OR_RETURN(FileGroups theirs, GroupsOf(*file, names));
    groups.push_back(std::move(theirs));
  }
  for (size_t i = 0; i < files.size(); ++i) {
    for (FileGroup& group : groups[i].groups) {
      group.options.erase("params");  // numbers within that file
      for (const std::string& each : group.names) found.emplace(each, std::pair(i, &group));
    }
  }
  OptimizerParts parts{{}, {}, FormOf(ours, /*copy=*/false)};
  for (const std::string& each : parts.form.names) {
    const auto from = found.find(each);
    if (from == found.end()) {
      parts.missing.push_back(each);
      continue;
    }
    // Other workers' parts of the optimizer, which have none of these, may be of another class.
    DG_RETURN_IF_ERROR(Annotate(CheckKind(groups[from->second.first], name), QuoteName(each)));
  }
  if (!parts.missing.empty()) return parts;
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("its group ", i, " has no parameters"));
    }
    const Json& options = found.at(ours[i][0]).second->options;
    for (const std::string& each : ours[i]) {
      if (found.at(each).second->options == options) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the parameters ", QuoteName(ours[i][0]), " and ", QuoteName(each),
                       " are in one group here, and were saved with different options"));
    }
    DG_RETURN_IF_ERROR(AppendOptions(options, i, name, &parts.state));
  }
  const std::set<absl::string_view> known(parts.form.names.begin(), parts.form.names.end());
  for (size_t i = 0; i < files.size(); ++i) {
    for (const auto& [key, info] : files[i]->header().tensors) {
      std::optional<StateName> of = ParseStateName(key);
      if (!of.has_value()) continue;
      of->parameter = names.Canonical(of->parameter);
      const auto from = found.find(of->parameter);
      // Of a parameter that somebody else has.
      if (from == found.end() || from->second.first != i || known.count(of->parameter) == 0) {
        continue;
      }
      DG_ASSIGN_OR_RETURN(at::Tensor tensor, read(i, key));
      parts.state.push_back({of->Text(), std::move(tensor)});
    }
  }
  StateForm check = parts.form;
  check.check_only = true;
  DG_RETURN_IF_ERROR(LoadState(parts.state, &optimizer, check));
  return parts;
}

}  // namespace

absl::Status SaveOptimizer(Optimizer& optimizer, const TensorMap& parameters,
                           const std::string& path) {
  const absl::StatusOr<OptimizerSnapshot> view = TrySnapshot(optimizer, parameters, /*copy=*/false);
  if (!view.ok()) return Annotate(view.status(), absl::StrCat("saving an optimizer to ", path));
  return SaveSafetensors(view->tensors, path, view->metadata);
}

absl::StatusOr<OptimizerSnapshot> SnapshotOptimizer(Optimizer& optimizer,
                                                    const TensorMap& parameters) {
  return TrySnapshot(optimizer, parameters, /*copy=*/true);
}

absl::StatusOr<std::vector<std::string>> OptimizerParameters(const Optimizer& optimizer,
                                                             const TensorMap& parameters) {
  DG_ASSIGN_OR_RETURN(const std::vector<Strings> groups, Names(parameters).Of(optimizer));
  return FormOf(groups, /*copy=*/false).names;
}

absl::StatusOr<OptimizerSnapshot> ViewOptimizer(Optimizer& optimizer, const TensorMap& parameters,
                                                const std::set<std::string>& only) {
  return TrySnapshot(optimizer, parameters, /*copy=*/false, &only);
}

absl::StatusOr<OptimizerParts> CollectOptimizer(const std::vector<const SafetensorsFile*>& files,
                                                const TensorMap& parameters, Optimizer& optimizer,
                                                const ReadTensor& read) {
  try {
    return Collect(files, parameters, optimizer, read);
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::Status LoadOptimizer(const std::string& path, const TensorMap& parameters,
                           Optimizer* optimizer) {
  DG_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  absl::Status loaded;
  try {
    loaded = Load(file, parameters, optimizer);
  } catch (...) {
    loaded = StatusFromException(std::current_exception());
  }
  return Annotate(loaded, absl::StrCat("loading an optimizer from ", path));
}

}  // namespace distgrad
