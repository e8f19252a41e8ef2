// libFuzzer on the reader of safetensors headers: any bytes are a header or an InvalidArgument. tools/fuzz runs it.
// The fuzzer can't know the length that comes first, so half of the inputs get the right one.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "ragged/base/error.h"
#include "ragged/sim/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string file(reinterpret_cast<const char*>(data), size);
  std::uint64_t bytes = size;
  if (size > 10 && data[size - 1] % 2 == 0) {
    const std::uint64_t data_bytes = static_cast<std::uint64_t>(data[size - 2]) * data[size - 3];
    file.resize(size - 3);
    std::string length;
    for (int i = 0; i < 8; ++i) length += static_cast<char>((std::uint64_t{file.size()} >> (8 * i)) & 0xff);
    file = length + file;
    bytes = file.size() + data_bytes;  // as if the values followed
  }
  try {
    for (const ragged::sim::StoredTensor& tensor : ragged::sim::parse_safetensors(file, bytes, "fuzz")) {
      if (ragged::checked_product(tensor.shape) < 0) __builtin_trap();
    }
  } catch (const ragged::InvalidArgument&) {
  }
  return 0;
}
