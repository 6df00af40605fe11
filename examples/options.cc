// Describes the options to CLI11, and reads them.
#include "examples/options.h"

#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <memory>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace distgrad {
namespace {

// Resolves a path in the user's folder: `bazel run` changes the working folder, and tells the
// former.
std::string FromUsersFolder(const std::string& path) {
  const char* folder = getenv("BUILD_WORKING_DIRECTORY");
  const std::filesystem::path base =
      folder != nullptr ? std::filesystem::path(folder) : std::filesystem::current_path();
  return (base / path).lexically_normal().string();
}

// Formats --help without what the descriptions say better.
class Formatter : public CLI::Formatter {
 public:
  Formatter() { column_width(24); }
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return "";
    const std::string type = option->get_type_name();  // "N:INT in [1 - 5]"
    const std::string value = option->get_default_str();
    return absl::StrCat(" ", type.substr(0, type.find(':')),
                        value.empty() ? "" : absl::StrCat(" [", value, "]"));
  }
};

CLI::Validator AboveZero() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool right = absl::SimpleAtod(text, &value) && std::isfinite(value) && value > 0;
        return right ? "" : absl::StrCat(text, " is not a number above 0");
      },
      "above 0");
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv, const CommandLine& line) {
  Options options = line.defaults;
  options.output = line.name;
  double timeout = absl::ToDoubleSeconds(options.timeout);

  CLI::App app(line.description, line.name);
  app.formatter(std::make_shared<Formatter>());
  app.set_help_flag("-h,--help", "Print this and exit");
  const auto add = [&](const char* name, auto& value, const char* type,
                       const std::string& description) {
    return app.add_option(name, value, description)->type_name(type)->capture_default_str();
  };
  CLI::Option* single =
      app.add_flag("--single", options.single, "Train in this process alone, without distgrad");
  if (!line.processes.empty()) {
    add(line.processes.c_str(), options.processes, "N",
        absl::StrCat(line.processes_description, ", 1 to ", line.most_processes))
        ->check(CLI::Range(1, line.most_processes))
        ->excludes(single);
  }
  if (line.add != nullptr) line.add(app);
  if (line.has_epochs) {
    add("--epochs", options.epochs, "N", "Times to go through the 60,000 training images")
        ->check(CLI::Range(1, 10'000));
  }
  add("--batch", options.batch, "N", line.batch)->check(CLI::Range(1, 60'000));
  add("--lr", options.learning_rate, "X",
      "Highest learning rate; rises to it in the first steps, then falls to 0")
      ->check(AboveZero());
  add("--seed", options.seed, "N", line.seed)->check(CLI::NonNegativeNumber);
  add("--data", options.data, "PATH", line.data);
  add("--output", options.output, "DIR", "Folder for the table and the picture");
  if (line.has_device) {
    add("--device", options.device, "NAME",
        "What computes: cpu, or cuda, each process on a GPU of its machine, in turns (of a build "
        "with --config=cuda)")
        ->check(CLI::IsMember({"cpu", "cuda"}));
  }
  if (line.has_worker_options) {
    add("--transport", options.transport, "NAME",
        "How workers talk to each other: socket, tcp, or shm (this machine; keeps a core busy)")
        ->check(CLI::IsMember({"socket", "tcp", "shm"}));
    add("--trace", options.trace, "FILE",
        "Record what each worker does and when, into FILE with its rank before the ending "
        "(trace.0.json), for ui.perfetto.dev")
        ->excludes(single);
    CLI::Option* const checkpoint =
        add("--checkpoint", options.checkpoint, "DIR",
            "Save checkpoints into this folder, which all workers see: every so many steps, at the "
            "end, and on Ctrl-C")
            ->excludes(single);
    add("--every", options.every, "N", "Steps between two checkpoints")
        ->check(CLI::PositiveNumber)
        ->needs(checkpoint);
    app.add_flag("--resume", options.resume,
                 "Go on from the last checkpoint there, with as many workers as you like; if there "
                 "is none, begin")
        ->needs(checkpoint);
  }
  add("--timeout", timeout, "SECONDS", "How long to wait for another process, to join or to answer")
      ->check(AboveZero());

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    const std::string message = absl::StrReplaceAll(error.what(), {{"\n", " "}});
    return absl::InvalidArgumentError(
        absl::StrCat(absl::StripAsciiWhitespace(message), " (--help explains the options)"));
  }
  options.timeout = absl::Seconds(timeout);
  options.output = FromUsersFolder(options.output);
  if (!options.data.empty()) options.data = FromUsersFolder(options.data);
  if (!options.checkpoint.empty()) options.checkpoint = FromUsersFolder(options.checkpoint);
  if (!options.trace.empty()) options.trace = FromUsersFolder(options.trace);
  if (line.check != nullptr) {
    if (auto s = line.check(options); !s.ok()) return s;
  }
  return options;
}

}  // namespace distgrad
