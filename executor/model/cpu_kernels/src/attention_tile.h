// The three products of attention with a tile of 64 keys, for kLanes rows of a KV head; see
// attention.h.
#include "tile.h"

constexpr int kTileKeys = 64;
constexpr int kKeyRows = kLanes / 2;  // keys whose scores are taken at once
constexpr int kValueRows = std::min(8, kTileRows);
constexpr int kValueColumns = 2 * kLanes;  // columns of values that are summed at once
constexpr int kLinePairs = 16;             // pairs of a line of the cache
constexpr float kHidden = -1e30f;          // below any score

// Rows of a tile's keys and values, as they lie in the cache.
struct TileRows {
  const bf16 *keys[kTileKeys], *values[kTileKeys];
};

// scores [kKeyRows][LANES] = keys . queries, of keys from `column` on. On the way it asks
// memory for keys and values of the tile after, so that the core has them by then.
template <class Sums, class Queries, int LANES = sizeof(Sums) / sizeof(float)>
inline void score(const bf16* const* keys, int64_t column, const uint32_t* queries, int64_t pairs,
                  float* scores, const bf16* const* next_keys, const bf16* const* next_values,
                  int64_t value_column) {
  const bf16* rows[kKeyRows];
  Sums sums[kKeyRows][2] = {};  // of even and of odd pairs
  for (int i = 0; i < kKeyRows; i++) rows[i] = keys[i] + column;
  for (int64_t line = 0; line < pairs; line += kLinePairs) {
    for (int i = 0; i < kKeyRows; i++) {
      _mm_prefetch((const char*)(next_keys[i] + column + 2 * line), _MM_HINT_T1);
      _mm_prefetch((const char*)(next_values[i] + value_column + 2 * line), _MM_HINT_T1);
    }
    for (int64_t k = line; k < line + kLinePairs; k += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        const auto query = load_as<Queries>(queries + (k + odd) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < kKeyRows; i++)
          sums[i][odd] = dot(sums[i][odd], load_as<uint32_t>(rows[i] + 2 * (k + odd)), query);
      }
  }
  for (int i = 0; i < kKeyRows; i++) store(scores + i * LANES, sums[i][0] + sums[i][1]);
}

// Turns a tile's scores [kTileKeys][LANES] into weights, pairs of bfloat16 [kTileKeys / 2][LANES],
// and takes them into each row's softmax: its largest score so far, the sum of its weights, and
// what earlier sums are worth now. Keys are those from `begin` to before `stop`, which are even.
// A vector may have the scores of two keys; then it has all else twice.
template <int LANES>
inline void soften(const float* scores, int begin, int stop, float scale, float* peaks,
                   float* totals, float* rescale, uint32_t* weights) {
  constexpr bool kHasTwo = LANES < kLanes;
  Floats top = load(peaks), total = set(0);
  for (int i = begin * LANES; i < stop * LANES; i += kLanes) top = max(load(scores + i), top);
  if (kHasTwo) top = max(top, swap_halves(top));
  const auto weight = [&](int key) {
    const Floats score = load(scores + key * LANES);
    return score == kHidden ? set(0) : exp((score - top) * scale);
  };
  for (int j = begin; j < stop; j += 2) {
    const Floats even = weight(j), odd = kHasTwo ? swap_halves(even) : weight(j + 1);
    store(weights + j / 2 * LANES, rounded(even) | rounded(odd) << 16);
    total += even + odd;
  }
  const Floats worth = exp((load(peaks) - top) * scale);
  store(rescale, worth);
  store(totals, total + load(totals) * worth);
  store(peaks, top);
}

// sums [ROWS][width] = sums * rescale + weights . values, kValueColumns of them from `column` on.
template <int LANES, int ROWS>
inline void add_values(const uint32_t* weights, const bf16* const* values, int64_t column,
                       int begin, int end, const float* rescale, float* sums, int64_t width) {
  Floats total[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      total[i][half] = load(sums + i * width + half * kLanes) * rescale[i];
  for (int j = begin; j < end; j += 2) {
    Words pairs[2];
    pair_rows(values[j] + column, values[j + 1] + column, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const uint32_t weight = weights[j / 2 * LANES + i];
      total[i][0] = dot(total[i][0], weight, pairs[0]);
      total[i][1] = dot(total[i][1], weight, pairs[1]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      store(sums + i * width + half * kLanes, total[i][half]);
}
