// The three products of attention with a tile of 64 keys, for all rows of a KV head; see attention.h.
#pragma once

#include "tile.h"

constexpr int kTileKeys = 64;
constexpr int kKeyRows = kDotLanes / 2;       // keys whose scores are taken at once
constexpr int kValueRows = std::min(8, kTileRows);
constexpr int kValueColumns = 2 * kDotLanes;  // columns of values that are summed at once
constexpr int kLinePairs = 16;                // pairs of a line of the cache
constexpr float kHidden = -1e30f;             // below any score

// Vectors of LANES sums, or of so many pairs of bfloat16.
template <int LANES>
struct Lanes;
template <>
struct Lanes<8> {
  using Sums = __m256;
  using Pairs = __m256i;
};
#ifdef TILE_AVX512
template <>
struct Lanes<16> {
  using Sums = __m512;
  using Pairs = __m512i;
};
#endif

template <class T>
inline T load_as(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Rows of a tile's keys and values, as they lie in the cache.
struct TileRows {
  const bf16* keys[kTileKeys];
  const bf16* values[kTileKeys];
};

// scores [kKeyRows][LANES] = keys . queries, of keys from `column` on. On the way it asks memory for
// keys and values of the tile after, so that they are in the cache of the core by then.
template <int LANES>
inline void score(const bf16* const* keys, int64_t column, const uint32_t* queries, int64_t pairs,
                  float* scores, const bf16* const* next_keys, const bf16* const* next_values,
                  int64_t value_column) {
  const bf16* rows[kKeyRows];
  typename Lanes<LANES>::Sums sums[kKeyRows][2] = {};  // of even and of odd pairs
  for (int i = 0; i < kKeyRows; i++) rows[i] = keys[i] + column;
  for (int64_t line = 0; line < pairs; line += kLinePairs) {
    for (int i = 0; i < kKeyRows; i++) {
      _mm_prefetch((const char*)(next_keys[i] + column + 2 * line), _MM_HINT_T1);
      _mm_prefetch((const char*)(next_values[i] + value_column + 2 * line), _MM_HINT_T1);
    }
    for (int64_t k = line; k < line + kLinePairs; k += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        const auto query = load_as<typename Lanes<LANES>::Pairs>(queries + (k + odd) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < kKeyRows; i++)
          sums[i][odd] = dot(sums[i][odd], load_as<uint32_t>(rows[i] + 2 * (k + odd)), query);
      }
  }
  for (int i = 0; i < kKeyRows; i++) {
    const auto score = sums[i][0] + sums[i][1];
    std::memcpy(scores + i * LANES, &score, sizeof score);
  }
}

// Turns a tile's scores [kTileKeys][LANES] into weights, pairs of bfloat16 [kTileKeys / 2][LANES], and
// takes them into each row's softmax: its largest score so far, the sum of its weights, and what
// earlier sums are worth now. Rows see keys from `first` to before `end`; `begin` and `stop`, even, are
// the least and the most of these.
template <int LANES>
void soften(float* __restrict scores, const int* first, const int* end, int begin, int stop,
            float scale, float* peaks, float* totals, float* rescale, uint32_t* __restrict weights) {
  float top[kLanes];
  std::copy_n(peaks, LANES, top);
  for (int j = begin; j < stop; j++)
#pragma omp simd
    for (int l = 0; l < LANES; l++) {
      float& score = scores[j * LANES + l];
      const bool seen = (j >= first[l]) & (j < end[l]) & (score != kHidden);
      score = seen ? score * scale : kHidden;
      top[l] = top[l] < score ? score : top[l];
    }
  std::copy_n(top, LANES, top + kLanes - LANES);  // 8 lanes: two keys at a time
  bf16 halves[kTileKeys * LANES];
  for (int i = begin * LANES; i < stop * LANES; i += kLanes) {
    const Floats score = load(scores + i);
    const Floats weight = select(equal(score, set(kHidden)), set(0), exp(score - load(top)));
    store(scores + i, weight);
    store(halves + i, weight);
  }
  float sums[LANES];
  for (int l = 0; l < LANES; l++) {
    rescale[l] = peaks[l] - top[l];
    peaks[l] = top[l];
    sums[l] = 0;
  }
  float scales[kLanes] = {};
  std::copy_n(rescale, LANES, scales);
  store(scales, exp(load(scales)));
  std::copy_n(scales, LANES, rescale);
  for (int j = begin; j < stop; j += 2) {
    const float* weight = scores + j * LANES;
    const bf16* half = halves + j * LANES;
    uint32_t* pair = weights + j / 2 * LANES;
    for (int l = 0; l < LANES; l++) sums[l] += weight[l] + weight[LANES + l];
    for (int l = 0; l < LANES; l++) pair[l] = half[l] | uint32_t(half[LANES + l]) << 16;
  }
  for (int l = 0; l < LANES; l++) totals[l] = __builtin_fmaf(totals[l], rescale[l], sums[l]);
}

// sums [ROWS][width] = sums * rescale + weights . values, kValueColumns of them from `column` on.
template <int LANES, int ROWS>
inline void add_values(const uint32_t* weights, const bf16* const* values, int64_t column, int begin,
                       int end, const float* rescale, float* sums, int64_t width) {
  using Sums = Lanes<kDotLanes>::Sums;
  Sums total[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      total[i][half] = load_as<Sums>(sums + i * width + half * kDotLanes) * rescale[i];
  for (int j = begin; j < end; j += 2) {
    Lanes<kDotLanes>::Pairs pairs[2];
    pair_rows(values[j] + column, values[j + 1] + column, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const uint32_t weight = weights[j / 2 * LANES + i];
      total[i][0] = dot(total[i][0], weight, pairs[0]);
      total[i][1] = dot(total[i][1], weight, pairs[1]);
    }
  }
  for (int i = 0; i < ROWS; i++) std::memcpy(sums + i * width, total[i], sizeof total[i]);
}
template <int LANES, int ROWS = kValueRows, class... Args>
inline void add_values_of(int rows, Args... args) {
  if (rows == ROWS)
    add_values<LANES, ROWS>(args...);
  else if constexpr (ROWS > 1)
    add_values_of<LANES, ROWS - 1>(rows, args...);
}
