// Describes the options of the transformer to CLI11, and checks how they fit together.
#include "examples/transformer_options.h"

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

void Add(TransformerOptions& own, CLI::App& app) {
  CLI::Option* const single = app.get_option("--single");
  const auto add = [&](const char* name, auto& value, const char* type, const char* description) {
    return app.add_option(name, value, description)->type_name(type)->capture_default_str();
  };
  add("--stages", own.stages, "N", "Worker processes that the model is split over")
      ->check(CLI::Range(1, 64))
      ->excludes(single);
  add("--schedule", own.schedule, "NAME",
      "In which order they compute: gpipe, 1f1b, interleaved (two stages on each worker), zb_h1, "
      "zb_h2")
      ->check(CLI::IsMember({"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2"}))
      ->excludes(single);
  add("--micro-batches", own.micro_batches, "N",
      "Parts of each batch, which go through the stages one behind the other")
      ->check(CLI::Range(1, 1024));
  add("--replicas", own.replicas, "N",
      "Pipelines, each with all stages and a part of each batch; their gradients are averaged")
      ->check(CLI::Range(1, 64))
      ->excludes(single);
  add("--steps", own.steps, "N", "Training steps")->check(CLI::Range(1, 1'000'000));
  add("--blocks", own.shape.blocks, "N", "Blocks of the transformer")->check(CLI::Range(1, 64));
  add("--width", own.shape.width, "N", "Numbers for each character between the blocks")
      ->check(CLI::Range(8, 4096));
  add("--context", own.shape.context, "N", "Characters that the model sees at once")
      ->check(CLI::Range(8, 4096));
}

absl::Status CheckFit(const TransformerOptions& own, Options& options) {
  const int processes = own.stages * own.replicas;
  options.processes = options.single ? 1 : processes;
  const auto wrong = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what..., " (--help explains the options)"));
  };
  if (own.shape.width % own.shape.heads != 0) {
    return wrong("--width=", own.shape.width, " is not a multiple of ", own.shape.heads,
                 ", the heads of the attention");
  }
  if (!options.single && own.model_stages() > own.shape.blocks) {
    return wrong("--stages=", own.stages, " with --schedule=", own.schedule, " makes ",
                 own.model_stages(), " stages, and --blocks=", own.shape.blocks, " are too few");
  }
  if (options.batch % own.replicas != 0) {
    return wrong("--batch=", options.batch, " is not a multiple of --replicas=", own.replicas);
  }
  if (options.batch / own.replicas < own.micro_batches) {
    return wrong("--batch=", options.batch, " is too small for --micro-batches=", own.micro_batches,
                 " of --replicas=", own.replicas);
  }
  return absl::OkStatus();
}

}  // namespace

CommandLine TransformerCommandLine(TransformerOptions* own) {
  CommandLine line;
  line.name = "transformer";
  line.description =
      "Trains a small transformer to write text like the King James Version of the Bible,\n"
      "character by character, its blocks split over worker processes that this program starts on\n"
      "this machine. Where a launcher has set RANK and WORLD_SIZE, it joins that job as one "
      "worker\n"
      "instead.\n";
  line.has_worker_options = true;
  line.has_epochs = false;
  line.defaults.batch = 16;
  line.defaults.learning_rate = 0.003;
  line.defaults.every = 100;
  line.batch = "Pieces of the text per training step";
  line.seed = "Decides the first weights, the pieces of the text, and what is written";
  line.data = "File with the text, if not the Bible of the package bible-kjv-text";
  line.add = [own](CLI::App& app) { Add(*own, app); };
  line.check = [own](Options& options) { return CheckFit(*own, options); };
  return line;
}

absl::StatusOr<Schedule> MakeSchedule(const TransformerOptions& options) {
  const int stages = options.stages, micro_batches = options.micro_batches;
  if (options.schedule == "gpipe") return GPipe(stages, micro_batches);
  if (options.schedule == "zb_h1") return ZeroBubbleH1(stages, micro_batches);
  if (options.schedule == "zb_h2") return ZeroBubbleH2(stages, micro_batches);
  if (options.schedule == "interleaved") {
    return InterleavedOneForwardOneBackward(stages, /*stages_per_rank=*/2, micro_batches);
  }
  return OneForwardOneBackward(stages, micro_batches);
}

}  // namespace distgrad
