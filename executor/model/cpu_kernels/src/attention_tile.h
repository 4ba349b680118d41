// The three products of attention with a tile of 64 keys, for all rows of a KV head; see attention.h.
#include "tile.h"

constexpr int kTileKeys = 64;
constexpr int kKeyRows = kLanes / 2;          // keys whose scores are taken at once
constexpr int kValueRows = std::min(8, kTileRows);
constexpr int kValueColumns = 2 * kLanes;     // columns of values that are summed at once
constexpr int kLinePairs = 16;                // pairs of a line of the cache
constexpr float kHidden = -1e30f;             // below any score

// Rows of a tile's keys and values, as they lie in the cache.
struct TileRows {
  const bf16* keys[kTileKeys];
  const bf16* values[kTileKeys];
};

// scores [kKeyRows][LANES] = keys . queries, of keys from `column` on. On the way it asks memory for
// values of the tile after, and its keys from pair `key_line` on, so that the core has them by then.
template <int LANES>
inline void score(const bf16* const* keys, int64_t column, const uint32_t* queries, int64_t pairs,
                  float* scores, const bf16* const* next_keys, const bf16* const* next_values,
                  int64_t value_column, int64_t key_line) {
  const bf16* rows[kKeyRows];
  typename Lanes<LANES>::Floats sums[kKeyRows][2] = {};  // of even and of odd pairs
  for (int i = 0; i < kKeyRows; i++) rows[i] = keys[i] + column;
  for (int64_t line = 0; line < pairs; line += kLinePairs) {
    for (int i = 0; i < kKeyRows; i++) {
      if (line >= key_line)
        _mm_prefetch((const char*)(next_keys[i] + column + 2 * line), _MM_HINT_T1);
      _mm_prefetch((const char*)(next_values[i] + value_column + 2 * line), _MM_HINT_T1);
    }
    for (int64_t k = line; k < line + kLinePairs; k += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        const auto query = load_as<typename Lanes<LANES>::Words>(queries + (k + odd) * LANES);
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
// earlier sums are worth now. Keys are those from `begin` to before `stop`, which are even.
template <int LANES>
void soften(const float* scores, int begin, int stop, float scale, float* peaks, float* totals,
            float* rescale, uint32_t* weights) {
  using Sums = typename Lanes<LANES>::Floats;
  float tops[kLanes];  // 8 of 16 lanes: two keys at a time
  Floats top = set(kHidden);
  for (int i = begin * LANES; i < stop * LANES; i += kLanes) top = max(load(scores + i), top);
  store(tops, top);
  for (int l = 0; l < LANES; l++) {
    tops[l] = std::max({peaks[l], tops[l], tops[l + kLanes - LANES]});
    rescale[l] = peaks[l] - tops[l];
    peaks[l] = tops[l];
  }
  std::copy_n(tops, LANES, tops + kLanes - LANES);
  top = load(tops);
  Sums total = {};
  for (int j = begin; j < stop; j += 2) {
    float both[2 * LANES];
    bf16 halves[2 * LANES];
    for (int i = 0; i < 2 * LANES; i += kLanes) {
      const Floats score = load(scores + j * LANES + i);
      const Floats weight = score == kHidden ? set(0) : exp((score - top) * scale);
      store(both + i, weight);
      store(halves + i, weight);
    }
    total += load_as<Sums>(both) + load_as<Sums>(both + LANES);
    const auto pairs = widen<LANES>(halves) | widen<LANES>(halves + LANES) << 16;
    std::memcpy(weights + j / 2 * LANES, &pairs, sizeof pairs);
  }
  store(rescale, exp(load(rescale) * scale));
  total += load_as<Sums>(totals) * load_as<Sums>(rescale);
  std::memcpy(totals, &total, sizeof total);
}

// sums [ROWS][width] = sums * rescale + weights . values, kValueColumns of them from `column` on.
template <int LANES, int ROWS>
inline void add_values(const uint32_t* weights, const bf16* const* values, int64_t column, int begin,
                       int end, const float* rescale, float* sums, int64_t width) {
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
