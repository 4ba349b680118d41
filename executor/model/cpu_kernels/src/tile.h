// The register tile: the one matrix product that all kernels are made of, and the walk over rows.
//
//     rows     up to kTileRows pointers to bfloat16 rows of one width, wherever they lie
//     panel    32 columns of a packed weight, [width / 2][32][2]: each 32-bit word has two
//              neighbours along the width, as a dot product of pairs takes them; of int8
//              [width][32], with a scale for each column
//     result   float32 [rows][32]
//
// A result is the sum over its row in one order, however many rows share the tile. So a row's bits
// do not depend on its batch, its place in it, or the number of threads.
//
// Each tile_*.h, of which TILE is one, has what one kind of CPU does in its own way: dot products
// of pairs, and rounding; with AMX the product, too. All is compiled once for each kind, into a
// library of its own.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

constexpr int kLanes = TILE_LANES;  // numbers of a vector

// Vectors of the compiler's, which take operators, and numbers for all lanes.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));  // pairs of bfloat16, or bits
typedef float Floats8 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));

template <class T>
inline T load_as(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
inline void store(void* p, T x) { std::memcpy(p, &x, sizeof x); }

#include TILE

constexpr int kColumns = 32;  // of a panel

inline Floats set(float x) { return x - Floats{}; }
inline Floats load(const float* p) { return load_as<Floats>(p); }
inline Floats load(const bf16* p) { return Floats(widen(p) << 16); }
// e to the x, to about 1e-6 of it; x is clamped to [-87, 88], so this is never 0 or infinite. NaN
// stays NaN.
inline Floats exp(Floats x) {
  constexpr float kWhole = 3 << 22;  // what is added to it has its last bit before the point
  x = min(set(88), max(set(-87), x));
  const Floats shifted = fma(x, set(1.44269504f), set(kWhole)), n = shifted - kWhole;
  Floats r = fma(n, set(-0.693359375f), x);  // x = n ln 2 + r; ln 2 in two parts, the first exact
  r = fma(n, set(2.12194440e-4f), r);
  Floats series = set(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) series = fma(series, r, set(c));
  return series * Floats((Words(shifted) + 127) << 23);  // 2 to the n
}

inline Floats sigmoid(Floats x) { return 1.f / (1.f + exp(-x)); }

// Calls run(std::integral_constant) for a count of 1 to MOST.
template <int MOST, class Run>
inline void with_constant(int count, Run run) {
  if (count == MOST)
    run(std::integral_constant<int, MOST>());
  else if constexpr (MOST > 1)
    with_constant<MOST - 1>(count, run);
}

// Pairs of a panel, from a column on.
inline auto pairs_at(const bf16* panel, int column) { return load_as<Words>(panel + 2 * column); }
inline auto pairs_at(const int8_t* panel, int column) {
  return pairs_of(load(panel + column), load(panel + kColumns + column));
}

// Memory that a thread keeps for its next call, from the beginning of a line of the cache; one for
// each type and number.
template <class T, int NUMBER = 0>
inline T* scratch(size_t size) {
  static thread_local std::vector<T> memory;
  constexpr size_t kLine = 64 / sizeof(T);
  if (memory.size() < size + kLine) memory.resize(size + kLine);
  return memory.data() + -(uintptr_t(memory.data()) / sizeof(T)) % kLine;
}

#ifdef TILE_AMX
#include "tile_amx.h"
#else
// result = rows . panel * scales + bias; scales of int8 only. `rows` point to where each ends:
// counting up to 0 takes no register for the end, of which 12 rows leave none. Few rows ask memory
// for what comes 4 KiB later, if the panel `is_new`.
template <int ROWS, class Weight>
inline void product(const bf16* const* rows, const Weight* panel, const float* scales,
                    const float* bias, int64_t width, bool is_new, float* result) {
  for (int column = 0; column < kColumns; column += 2 * kLanes) {
    Floats sums[ROWS][2] = {};
    const Weight* weights = panel;
    for (int64_t k = -width / 2; k < 0; k++, weights += 2 * kColumns) {
      const auto low = pairs_at(weights, column), high = pairs_at(weights, column + kLanes);
      if (ROWS <= 8 && is_new)
        for (int line = 0; line < 4 * kLanes * (int)sizeof(Weight); line += 64)
          _mm_prefetch((const char*)(weights + 2 * column) + 4096 + line, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int i = 0; i < ROWS; i++) {
        const uint32_t pair = load_as<uint32_t>(rows[i] + 2 * k);
        sums[i][0] = dot(sums[i][0], pair, low);
        sums[i][1] = dot(sums[i][1], pair, high);
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int half = 0; half < 2; half++) {
        const int at = column + half * kLanes;
        if constexpr (sizeof(Weight) == 1) sums[i][half] *= load(scales + at);
        store(result + i * kColumns + at, sums[i][half] + load(bias + at));
      }
  }
}

template <class Weight>
inline void product(const bf16* const* rows, int64_t count, const Weight* panel,
                    const float* scales, const float* bias, int64_t width, bool is_new,
                    float* result) {
  with_constant<kTileRows>(count, [&](auto constant) {
    product<decltype(constant)::value>(rows, panel, scales, bias, width, is_new, result);
  });
}

// Returns how many of the rows that are left come next: at the end two like tiles, rather than a
// full one and a small one.
inline int64_t next_rows(int64_t left) {
  return left <= kTileRows ? left : left < 2 * kTileRows ? (left + 1) / 2 : kTileRows;
}

struct [[maybe_unused]] Configured {};  // what a thread has about it that multiplies: nothing here
#endif

// A packed weight: panels of `width`, of int8 if their columns have scales, else of bfloat16;
// scales and biases may be null.
struct Panels {
  const void* weights;
  const float *scales, *bias;
  int64_t width;
};

inline const float kNoBias[kColumns] = {};

// Multiplies the rows row(i), first <= i < last, with a panel, in a thread that is `Configured`.
// Calls use(i, columns) for each, with float32 [32].
template <class Row, class Use>
inline void multiply(int64_t first, int64_t last, const Panels& panels, int64_t panel, Row row,
                     Use use) {
  const int64_t at = panel * kColumns, width = panels.width;
  const float* const bias = panels.bias ? panels.bias + at : kNoBias;
  const bf16* rows[kTileRows];
  alignas(64) float result[kTileRows * kColumns];
  for (int64_t start = first, count; start < last; start += count) {
    count = next_rows(last - start);
    for (int64_t i = 0; i < count; i++) rows[i] = row(start + i) + width;
    const auto run = [&](const auto* weights, const float* scales) {
      product(rows, count, weights + at * width, scales, bias, width, start == first, result);
    };
    panels.scales ? run((const int8_t*)panels.weights, panels.scales + at)
                  : run((const bf16*)panels.weights, nullptr);
    for (int64_t i = 0; i < count; i++) use(start + i, result + i * kColumns);
  }
}

// Writes 32 columns, rounded.
inline void store_columns(bf16* y, const float* sums) {
  for (int c = 0; c < kColumns; c += kLanes) store(y + c, load(sums + c));
}

// Whether a product of so many rows with so many weights is worth waking threads for: 40 us of one
// core, of which reading a weight from memory takes as much as 8 rows with it.
inline bool worth_sharing(int64_t weights, int64_t rows) { return weights * (8 + rows) > 1 << 23; }
