// The two 8-bit formats of Adam's moments, for one element of one tile: decode, encode, and what becomes of a tile's
// largest magnitude. Shared by the CPU and CUDA kernels; no torch, no loops.
//
// [Note: tile codes] A tile is at most 32 x 32 elements of one matrix. Each moment of a tile has one fp32 scale, its
// largest magnitude, and a byte an element in the parameter's own layout.
//   power    first moment: scale * sign(k) * (|k| / 127)^2, k a signed byte; second: scale * (k / 255)^4. No table,
//            and encoding what was decoded gives the same bytes and scale. The default.
//   dynamic  index into the maps of Dettmers et al. (arXiv 2110.02861) as bitsandbytes builds them, nearest value,
//            ties to the lower index. The signed map has no -1, so a tile whose largest first moment is negative
//            shrinks by 0.7 % whenever it is encoded.
// Three guards keep a lost second moment from blowing an update up (the step would be lr * m / eps): zero is a code of
// the first moment; a second moment above zero never becomes code 0; where the second moment decodes to 0, so does the
// first. `guards = false` leaves out the last two, for comparison with others' 8-bit Adam.
#pragma once

#include <cfloat>
#include <cstdint>

#include "ragged/optim/adamw_math.h"

namespace ragged::optim {

inline constexpr int kTileRows = 32;
inline constexpr int kTileColumns = 32;

enum class TileFormat { kPower, kDynamic };

/// What a moment of zero is stored as: states begin with these bytes and scales of 0.
RAGGED_DEVICE std::uint8_t zero_code(TileFormat format, bool is_signed) {
  return static_cast<std::uint8_t>(format == TileFormat::kDynamic && is_signed ? 127 : 0);
}

/// The scale of a tile whose largest magnitude is this one. Below the normal numbers it is 0, and with it all that the
/// tile holds: reciprocals stay finite, and moments without gradients end at 0 instead of at the last denormal.
RAGGED_DEVICE float tile_scale(float largest) {
  return largest >= FLT_MIN ? largest : 0.0F;
}

/// To nearest even, 0 <= value < 2^22. By addition, so that it needs no instruction of its own in a vector.
RAGGED_DEVICE std::int32_t round_half_even(float value) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: one unit in the last place is 1
  return static_cast<std::int32_t>(bits_of(value + kShift)) - 0x4B400000;
}

/// Decodes and encodes *numbers*, codes as loops over 32-bit lanes like them: first_number() and second_number() of a
/// stored byte, whose low byte is what is stored.
struct PowerCodes {
  static constexpr TileFormat kFormat = TileFormat::kPower;

  RAGGED_DEVICE static std::int32_t first_number(std::uint8_t code) { return static_cast<std::int8_t>(code); }
  RAGGED_DEVICE static std::int32_t second_number(std::uint8_t code) { return code; }
  RAGGED_DEVICE float decode_first(std::int32_t number, float scale) const {
    const float k = static_cast<float>(number) * (1.0F / 127.0F);
    return scale * (k * float_of(bits_of(k) & 0x7FFFFFFFU));
  }
  RAGGED_DEVICE float decode_second(std::int32_t number, float scale) const {
    const float k = static_cast<float>(number) * (1.0F / 255.0F);
    const float square = k * k;
    return scale * (square * square);
  }

  /// What of an element's second moment is kept until its tile's scale is known: its root, which the step has anyway.
  RAGGED_DEVICE float kept(float /*exp_avg_sq*/, float root) const { return root; }
  /// The factor that `encode_second` takes.
  RAGGED_DEVICE float second_factor(float scale) const { return scale > 0.0F ? 1.0F / square_root(scale) : 0.0F; }
  RAGGED_DEVICE float first_factor(float scale) const { return scale > 0.0F ? 1.0F / scale : 0.0F; }

  RAGGED_DEVICE std::int32_t encode_first(float value, float factor) const {
    const float magnitude = float_of(bits_of(value) & 0x7FFFFFFFU);
    const std::int32_t rounded = round_half_even(square_root(magnitude * factor) * 127.0F);
    const std::int32_t k = rounded < 127 ? rounded : 127;
    const std::int32_t sign = static_cast<std::int32_t>(bits_of(value)) >> 31;  // all ones or none
    return (k ^ sign) - sign;
  }
  RAGGED_DEVICE std::int32_t encode_second(float kept, float factor) const {
    const std::int32_t rounded = round_half_even(square_root(kept * factor) * 255.0F);
    return rounded < 255 ? rounded : 255;
  }
};

/// Maps, and what finds the nearest entry without a search: a float's upper bits name a cell that holds at most one
/// border between entries. Plain data: a device gets a copy. dynamic_tables.cpp fills it.
struct DynamicTables {
  // Magnitudes from 2^-24 to 1, a cell each 2^-7 of a power of two.
  static constexpr int kExponents = 24;
  static constexpr int kMantissaBits = 7;
  static constexpr int kCells = (kExponents << kMantissaBits) + 1;
  static constexpr std::uint32_t kFirstBits = (127U - kExponents) << 23;
  static constexpr int kNegativeBorders = 130;

  float first[256];   // ascending; entry 127 is 0
  float second[256];  // ascending; entry 0 is 0
  // By magnitude: the entry below a cell's border, counted from zero, and the largest float that still belongs to it.
  std::int32_t first_cells[kCells];  // as wide as what is looked up with them: vectors gather such
  std::int32_t second_cells[kCells];
  // Above entry k of the positive half, where the lower index is nearer 0; then the same of the negative half, where it
  // is farther from 0.
  float first_borders[2 * kNegativeBorders];
  float second_borders[256];
};
/// Built once; for the life of the process.
const DynamicTables& dynamic_tables();

/// As PowerCodes.
struct DynamicCodes {
  static constexpr TileFormat kFormat = TileFormat::kDynamic;
  const DynamicTables* tables;

  RAGGED_DEVICE static std::int32_t first_number(std::uint8_t code) { return code; }
  RAGGED_DEVICE static std::int32_t second_number(std::uint8_t code) { return code; }
  RAGGED_DEVICE float decode_first(std::int32_t number, float scale) const { return tables->first[number] * scale; }
  RAGGED_DEVICE float decode_second(std::int32_t number, float scale) const { return tables->second[number] * scale; }

  RAGGED_DEVICE float kept(float exp_avg_sq, float /*root*/) const { return exp_avg_sq; }
  RAGGED_DEVICE float second_factor(float scale) const { return scale > 0.0F ? 1.0F / scale : 0.0F; }
  RAGGED_DEVICE float first_factor(float scale) const { return scale > 0.0F ? 1.0F / scale : 0.0F; }

  RAGGED_DEVICE std::int32_t encode_first(float value, float factor) const {
    const float magnitude = float_of(bits_of(value) & 0x7FFFFFFFU) * factor;
    const std::int32_t negative = static_cast<std::int32_t>(bits_of(value) >> 31);
    const std::int32_t below = tables->first_cells[cell(magnitude)];
    // The negative half has one entry less, there is no -1, and borders of its own.
    const std::int32_t k =
        below + (magnitude > tables->first_borders[below + negative * DynamicTables::kNegativeBorders] ? 1 : 0);
    return negative ? 127 - (k < 127 ? k : 127) : 127 + k;
  }
  RAGGED_DEVICE std::int32_t encode_second(float kept, float factor) const {
    const float magnitude = kept * factor;
    const std::int32_t below = tables->second_cells[cell(magnitude)];
    return below + (magnitude > tables->second_borders[below] ? 1 : 0);
  }

  /// Of a magnitude in [0, 1], a rounding above 1 included.
  RAGGED_DEVICE static std::int32_t cell(float magnitude) {
    const auto bits =
        static_cast<std::int32_t>(bits_of(magnitude)) - static_cast<std::int32_t>(DynamicTables::kFirstBits);
    const std::int32_t index = (bits > 0 ? bits : 0) >> (23 - DynamicTables::kMantissaBits);
    return index < DynamicTables::kCells - 1 ? index : DynamicTables::kCells - 1;
  }
};

/// The moments of one element before its step.
struct TileMoments {
  float first;
  float second;
};

/// Of codes as numbers: Codes::first_number and second_number of the stored bytes.
template <class Codes, bool kGuards>
RAGGED_DEVICE TileMoments
decode_numbers(const Codes& codes, std::int32_t first, std::int32_t second, float first_scale, float second_scale) {
  TileMoments moments{codes.decode_first(first, first_scale), codes.decode_second(second, second_scale)};
  if (kGuards) moments.first = moments.second > 0.0F ? moments.first : 0.0F;
  return moments;
}
/// Of the stored bytes.
template <class Codes, bool kGuards>
RAGGED_DEVICE TileMoments
decode_moments(const Codes& codes, std::uint8_t first, std::uint8_t second, float first_scale, float second_scale) {
  return decode_numbers<Codes, kGuards>(
      codes, Codes::first_number(first), Codes::second_number(second), first_scale, second_scale);
}

/// One step of one element up to encoding. A gradient that isn't finite reaches the parameter and nothing else: the
/// moments stay as they were, so no scale ever sees it.
struct TileElement {
  float param;
  float first;       // new first moment
  float first_size;  // its magnitude
  float second;      // new second moment
  float kept;        // what encode_second takes
  bool finite;       // the gradient was
};

template <class Codes>
RAGGED_DEVICE TileElement
step_element(const Codes& codes, const AdamWStep& step, float param, float grad, const TileMoments& old) {
  const AdamWMoments next = adamw_moments(step, grad, old.first, old.second);
  TileElement element;
  element.finite = is_finite(grad);
  element.first = element.finite ? next.first : old.first;
  element.first_size = float_of(bits_of(element.first) & 0x7FFFFFFFU);
  element.second = element.finite ? next.second : old.second;
  const float root = square_root(element.second);
  const float moved = adamw_param(step, param, element.first, root);
  element.param = element.finite ? moved : grad - grad;  // NaN
  element.kept = codes.kept(element.second, root);
  return element;
}

/// The second moment's code. Stored, a code is the low byte of its number.
template <class Codes, bool kGuards>
RAGGED_DEVICE std::int32_t encode_second_guarded(const Codes& codes, float kept, float factor) {
  const std::int32_t code = codes.encode_second(kept, factor);
  if (!kGuards) return code;
  const std::int32_t least = kept > 0.0F && factor > 0.0F ? 1 : 0;
  return code > least ? code : least;
}

}  // namespace ragged::optim
