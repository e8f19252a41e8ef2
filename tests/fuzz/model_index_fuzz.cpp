// libFuzzer on the reader of model.safetensors.index.json: any text is an index or an InvalidArgument, and no name in
// it leads out of the folder. tools/fuzz runs it.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "ragged/base/error.h"
#include "ragged/plan/safetensors_index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  // Half of the inputs are taken for the map alone, which the fuzzer needn't wrap then.
  if (size > 0 && data[0] % 2 == 0) text = "{\"weight_map\":{" + text + "}}";
  try {
    const std::map<std::string, std::string> files = ragged::plan::parse_safetensors_index(text, "fuzz");
    if (files.empty()) __builtin_trap();
    for (const auto& [name, file] : files) {
      const std::filesystem::path path = std::filesystem::path("folder") / file;
      if (path.lexically_normal().parent_path() != "folder") __builtin_trap();
    }
    if (ragged::plan::parse_safetensors_index(ragged::plan::write_safetensors_index(files, 1), "again") != files) {
      __builtin_trap();
    }
  } catch (const ragged::InvalidArgument&) {
  }
  return 0;
}
