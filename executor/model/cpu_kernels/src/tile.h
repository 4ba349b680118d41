// The register tile: the one matrix product that all kernels are made of, and the walk over rows.
//
//     rows     up to kTileRows pointers to bfloat16 rows of one width, wherever they lie
//     panel    32 columns of a packed weight, [width / 2][32][2]: each 32-bit word has two
//              neighbours along the width, as a dot product of pairs takes them
//     result   float32 [rows][32]
//
// A result is the sum over its row in one order, however many rows share the tile. So a row's bits
// do not depend on its batch, its place in it, or the number of threads.
//
// Each tile_*.h has `product` for one kind of CPU, and `Floats`: 16 float32 lanes to write the rest
// with. All of it is compiled once for each kind, into a library of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#define KERNEL extern "C" __attribute__((visibility("default")))

using bf16 = uint16_t;
using Mask = uint16_t;  // a bit for each lane of Floats, lane 0 lowest

constexpr int kLanes = 16;
constexpr int kColumns = 32;  // of a panel

#if defined(TILE_AVX512)
#include "tile_avx512.h"
#elif defined(TILE_AVX2)
#include "tile_avx2.h"
#else
#error "no tile: define TILE_AVX512 or TILE_AVX2"
#endif

inline Mask first_lanes(int64_t count) {
  return count >= kLanes ? 0xffff : count <= 0 ? 0 : Mask((1u << count) - 1);
}

inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// e to the x, to about 1e-6 of it; x is clamped to [-87, 88], so this is never 0 or infinite. NaN
// stays NaN: of two operands, min and max return the second then.
inline Floats exp(Floats x) {
  x = min(set(88.f), max(set(-87.f), x));
  const Floats n = round(x * set(1.44269504f));  // x = n ln 2 + r
  Floats r = fma(n, set(-0.693359375f), x);      // ln 2 in two parts, the first exact
  r = fma(n, set(2.12194440e-4f), r);
  Floats series = set(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) series = fma(series, r, set(c));
  return series * pow2(n);
}

inline Floats sigmoid(Floats x) { return set(1) / (set(1) + exp(set(0) - x)); }

template <int ROWS = kTileRows>
inline void product_of(int count, const bf16* const* rows, const bf16* panel, int64_t pairs,
                       float* result) {
  if (count == ROWS)
    product<ROWS>(rows, panel, pairs, result);
  else if constexpr (ROWS > 1)
    product_of<ROWS - 1>(count, rows, panel, pairs, result);
}

// Multiplies the rows row(i) of `width`, first <= i < last, with a panel. Calls use(i, low, high) with
// columns 0-15 and 16-31 of each.
template <class Row, class Use>
inline void multiply(int64_t first, int64_t last, int64_t width, const bf16* panel, Row row, Use use) {
  const bf16* rows[kTileRows];
  float result[kTileRows * kColumns];
  while (first < last) {
    const int64_t left = last - first;
    // Two like tiles at the end, rather than a full one and a small one.
    const int count = left <= kTileRows ? left : left < 2 * kTileRows ? (left + 1) / 2 : kTileRows;
    for (int i = 0; i < count; i++) rows[i] = row(first + i);
    product_of(count, rows, panel, width / 2, result);
    for (int i = 0; i < count; i++) {
      const float* columns = result + i * kColumns;
      use(first + i, load(columns), load(columns + kLanes));
    }
    first += count;
  }
}

// Whether a product of so many rows with so many weights is worth waking threads for: 40 us of one
// core, of which reading a weight from memory takes as much as 8 rows with it.
inline bool worth_sharing(int64_t weights, int64_t rows) { return weights * (8 + rows) > (1 << 23); }
