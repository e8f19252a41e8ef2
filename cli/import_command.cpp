#include "import_command.h"

#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "output.h"
#include "ragged/base/error.h"
#include "ragged/base/text.h"
#include "ragged/checkpoint/file.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_export.h"
#include "ragged/train/hf_weights.h"

namespace ragged::cli {
namespace {

namespace fs = std::filesystem;

// Training reads text as bytes, whatever the model's own tokenizer does.
std::string tokenizer_note(const fs::path& folder) {
  constexpr Index kMost = Index{1} << 30;
  std::error_code error;
  const fs::path tokenizer = folder / "tokenizer.json";
  const bool is_bytes =
      fs::is_regular_file(tokenizer, error) && checkpoint::read_file(tokenizer, kMost) == train::byte_tokenizer_json();
  if (is_bytes) return "";
  return "note: `ragged train` feeds text as bytes, not as the tokens that this model was trained on\n";
}

}  // namespace

void run_import(const ImportArguments& arguments) {
  std::error_code error;
  RAGGED_CHECK(
      arguments.config.empty() || !fs::exists(arguments.config, error),
      "[import] Expected a config file that doesn't exist yet, but '{}' does. Nothing is overwritten.",
      arguments.config);
  const train::HfWeights weights = train::HfWeights::open(arguments.folder);
  const std::string config = train::import_config(weights);
  if (arguments.config.empty()) {
    print(config);
    return;
  }
  write_file(arguments.config, config);
  std::string text = fmt::format(
      "{}: {}, {} tensors, {} bytes; names, shapes and dtypes fit\n", arguments.folder, weights.names().architecture,
      weights.names().theirs.size(), grouped(weights.files().bytes()));
  if (!weights.unused().empty()) text += fmt::format("not needed: {}\n", fmt::join(weights.unused(), ", "));
  print(text + tokenizer_note(arguments.folder) + fmt::format("train it with: ragged train {}\n", arguments.config));
}

}  // namespace ragged::cli
