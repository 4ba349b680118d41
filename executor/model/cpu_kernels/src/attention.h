// Attention over paged keys and values: one new token of a sequence, a few (verify, with a tree or
// without), a prompt with or without prefix; grouped-query heads, latents (MLA), windows, sinks.
//
// Rows are queries x heads of one KV head. Keys are taken in tiles of 64, which begin at multiples
// of 64 of the position in every pass. So a row's sums are taken in one order, and its bits do not
// depend on its batch, its chunk, or whether it is decoded, verified or prefilled. Each query of a
// tree is by itself: the keys that it sees follow one another, as they will once they are accepted.
//
//     scores    [key][row]      keys as they lie in their blocks, times queries packed once
//     weights   [pair][row]     of keys; a softmax that is kept up to date from tile to tile
//     sums      [row][column]   weights times values, whose rows are paired in registers
//
// Keys, values, queries and results are bfloat16 or float32; sums are float32. Nothing of the cache is
// copied or transposed. Latents, whose values are the first columns of
// their keys, come from memory once, for all heads.
//
// Source: Milakov and Gimelshein 2018, algorithm 3 (the softmax); Dao et al. 2022, algorithm 1.
#include <omp.h>

#include "attention_tile.h"

constexpr int64_t kMostRows = 64;  // of an item, unless one query has more
constexpr int64_t kFewRows = 32;   // up to this, an item has all KV heads: memory is read in order

// Widths are multiples of 32; a query sees `window` keys with its own, or all if that is 0; sinks
// [heads], or null.
struct AttentionLayer {
  int64_t heads, kv_heads, key_width, value_width, window;
  const float* sinks;
  float scale;
};

// The block table has `columns`. Of each sequence: its row there, its keys with those of this pass,
// its queries (null: 1). Of each row: the slot where its keys and values go. tree [queries,
// tree_width]: which of the last keys each query sees; null: those before it.
struct AttentionBatch {
  int64_t rows, sequences, block_size, columns, tree_width;
  const int64_t *table_rows, *lengths, *counts, *slots;
  const bool* tree;
};

template <class T>
struct AttentionRows {
  const T *q, *k, *v;  // heads side by side; k null: nothing is written; v null: k has them
  int64_t q_stride, k_stride, v_stride;  // from row to row
  T *keys, *values;                      // caches [slots, KV heads, width]; the same for latents
  const int32_t* table;                  // [.., columns]
  T* out;                                // [rows, heads * value_width]
};

// What one thread attends at a time: some queries of a sequence, which has `count` from `row` on;
// some KV heads, and some of the heads of each.
struct AttentionItem {
  int64_t sequence, row, count, query, queries, kv_head, kv_heads, head, heads;
};

// A row has a lane of vectors, which have LANES. Lanes past the last row are as that one. Where
// rows are few, LANES is 8, and vectors of 16 have them twice.
template <class T, class Sums, class Queries, int LANES = sizeof(Sums) / sizeof(float)>
struct Attend {
  void run() {
    std::fill_n(sums_, item_.kv_heads * num_rows_ * layer_.value_width, 0.f);
    if (batch_.tree) find_path();
    for (int64_t lane = 0; lane < lanes_; lane++) begin_lane(lane);
    const int64_t start = lowest() / kTileKeys * kTileKeys;
    TileRows<T> tiles[2];
    if (start < highest()) locate(start, tiles[0]);
    for (int64_t tile = start, side = 0, next; tile < highest(); tile += kTileKeys, side = next) {
      next = tile + kTileKeys < highest() ? 1 - side : side;
      if (next != side) locate(tile + kTileKeys, tiles[next]);
      for (int64_t m = 0; m < item_.kv_heads; m++) attend_tile(m, tile, tiles[side], tiles[next]);
    }
    for (int64_t m = 0; m < item_.kv_heads; m++)
      for (int64_t r = 0; r < num_rows_; r++) {
        const int64_t width = layer_.value_width, row = item_.row + query_of(r);
        const float total = totals_[m * lanes_ + r], *sums = sums_ + (m * num_rows_ + r) * width;
        const Floats scale = set(total > 0 ? 1 / total : total);  // without keys: 0
        T* out = rows_.out + (row * layer_.heads + head_of(m, r)) * width;
        for (int64_t c = 0; c < width; c += kLanes) store(out + c, load(sums + c) * scale);
      }
  }

  // Keys that any row sees: those of later queries neither begin nor end before. No rows see none.
  int64_t lowest() const { return lanes_ ? first_[0] : 0; }
  int64_t highest() const { return lanes_ ? end_[lanes_ - 1] : 0; }
  int64_t query_of(int64_t r) const { return item_.query + r / item_.heads; }
  int64_t head_of(int64_t m, int64_t r) const {
    return (item_.kv_head + m) * (layer_.heads / layer_.kv_heads) + item_.head + r % item_.heads;
  }

  // Packs a lane's queries, and says which keys it sees.
  void begin_lane(int64_t lane) {
    const int64_t r = std::min(LANES < kLanes ? lane % LANES : lane, num_rows_ - 1);
    const int64_t length = batch_.lengths[item_.sequence];
    const int64_t position = length - item_.count + query_of(r);
    end_[lane] = std::max<int64_t>(batch_.tree ? length - batch_.tree_width : position + 1, 0);
    end_[lane] += path_.size();
    first_[lane] = layer_.window ? std::max<int64_t>(position + 1 - layer_.window, 0) : 0;
    for (int64_t m = 0; m < item_.kv_heads; m++) {
      const int64_t head = head_of(m, r), at = m * lanes_ + lane;
      peaks_[at] = layer_.sinks ? layer_.sinks[head] / layer_.scale : kHidden;
      totals_[at] = layer_.sinks != nullptr;
      const T* query = rows_.q + (item_.row + query_of(r)) * rows_.q_stride;
      query += head * layer_.key_width;
      uint32_t* const packed = queries_ + at / LANES * LANES * words_ + at % LANES;
      for (int64_t k = 0; lane < num_rows_ && k < words_; k++)
        packed[k * LANES] = load_as<uint32_t>(query + kPer * k);
    }
  }

  // Looks up the rows of a tile. In place of keys that no row sees, there is the nearest that one
  // does: the others may hold anything.
  void locate(int64_t tile, TileRows<T>& tile_rows) const {
    const int64_t first = std::max(lowest(), tile), end = std::min(highest(), tile + kTileKeys);
    const int32_t* table = rows_.table + batch_.table_rows[item_.sequence] * batch_.columns;
    int64_t column = first / batch_.block_size, place = first % batch_.block_size;
    const auto put = [&](int64_t j) {
      const int64_t slot = table[column] * batch_.block_size + place;
      const int64_t head = slot * layer_.kv_heads + item_.kv_head;
      tile_rows.keys[j - tile] = rows_.keys + head * layer_.key_width;
      tile_rows.values[j - tile] = rows_.values + head * value_stride_;
    };
    for (int64_t j = tile; j < tile + kTileKeys; j++) {
      put(j);
      if (first <= j && j + 1 < end && ++place == batch_.block_size) column++, place = 0;
    }
    int64_t next = std::max<int64_t>(batch_.lengths[item_.sequence] - batch_.tree_width, 0);
    for (int64_t position : path_) {
      column = position / batch_.block_size, place = position % batch_.block_size;
      for (int64_t j = std::max(next++, tile); j < tile + kTileKeys; j++) put(j);
    }
  }

  // Finds the places of those of the last keys that a tree shows the item's only query.
  void find_path() {
    const int64_t behind = batch_.lengths[item_.sequence] - batch_.tree_width;
    const bool* seen = batch_.tree + (item_.row + item_.query) * batch_.tree_width;
    for (int64_t i = std::max<int64_t>(-behind, 0); i < batch_.tree_width; i++)
      if (seen[i]) path_.push_back(behind + i);
  }

  void attend_tile(int64_t m, int64_t tile, const TileRows<T>& rows, const TileRows<T>& next) {
    const int64_t value_at = m * value_stride_, width = layer_.value_width;
    const int begin = std::max<int64_t>(lowest() - tile, 0) & ~1;
    const int stop = (std::min<int64_t>(highest() - tile, kTileKeys) + 1) & ~1;
    const bool hides = tile + begin < first_[lanes_ - 1] || tile + stop > end_[0];
    for (int64_t b = 0; b < lanes_; b += kLanes) {
      const TileRows<T>& ahead = b ? rows : next;
      const uint32_t* queries = queries_ + (m * lanes_ + b) * words_;
      for (int j = begin / kKeyRows * kKeyRows; j < stop; j += kKeyRows)
        score<T, Sums, Queries>(rows.keys + j, m * layer_.key_width, queries, words_,
                                scores_ + j * LANES, ahead.keys + j, ahead.values + j, value_at);
      if (hides) hide(b, tile, begin, stop);
      const int64_t at = m * lanes_ + b;
      soften<T, LANES>(scores_, begin, stop, layer_.scale, peaks_ + at, totals_ + at,
                       rescale_ + b, weights_ + b * kTileWords);
    }
    for (int64_t column = 0; column < width; column += kValueColumns)
      for (int64_t r = 0, count; r < num_rows_; r += count) {
        count = std::min<int64_t>(num_rows_ - r, kValueRows);
        const uint32_t* weights = weights_ + r / LANES * LANES * kTileWords + r % LANES;
        with_constant<kValueRows>(count, [&](auto constant) {
          add_values<T, LANES, decltype(constant)::value>(
              weights, rows.values, value_at + column, begin, stop, rescale_ + r,
              sums_ + (m * num_rows_ + r) * width + column, width);
        });
      }
  }

  // Hides keys outside of a row's own.
  void hide(int64_t b, int tile, int begin, int stop) {
    for (int j = begin; j < stop; j++)
#pragma omp simd
      for (int l = 0; l < LANES; l++)
        if (tile + j < first_[b + l] || tile + j >= end_[b + l]) scores_[j * LANES + l] = kHidden;
  }

  static constexpr int kPer = kPerWord<T>, kTileWords = kTileKeys / kPer;

  const AttentionLayer& layer_;
  const AttentionBatch& batch_;
  const AttentionRows<T>& rows_;
  const AttentionItem& item_;
  const int64_t num_rows_ = item_.queries * item_.heads, words_ = layer_.key_width / kPer;
  const bool is_latent_ = rows_.keys == rows_.values;
  const int64_t value_stride_ = is_latent_ ? layer_.key_width : layer_.value_width;
  const int64_t lanes_ = (num_rows_ + kLanes - 1) / kLanes * kLanes;
  const int64_t all_lanes_ = item_.kv_heads * lanes_;
  // [KV heads][lanes / LANES][words of columns][LANES]
  uint32_t* const queries_ = scratch<uint32_t, 0>(all_lanes_ * words_);
  // [lanes / LANES][words of keys][LANES]
  uint32_t* const weights_ = scratch<uint32_t, 1>(lanes_ * kTileWords);
  float* const scores_ = scratch<float, 1>(kTileKeys * kLanes);
  // [KV heads][rows][value_width]
  float* const sums_ = scratch<float, 2>(item_.kv_heads * num_rows_ * layer_.value_width);
  float* const peaks_ = scratch<float, 3>(all_lanes_);   // [KV heads][lanes], as are totals
  float* const totals_ = scratch<float, 4>(all_lanes_);
  float* const rescale_ = scratch<float, 5>(lanes_);
  int* const first_ = scratch<int, 0>(lanes_);  // of the keys that each lane sees
  int* const end_ = scratch<int, 1>(lanes_);
  std::vector<int64_t> path_ = {};
};

// Divides a batch among threads: no row depends on how.
inline std::vector<AttentionItem> attention_items(const AttentionLayer& layer,
                                                  const AttentionBatch& batch) {
  const int64_t threads = omp_get_max_threads(), group = layer.heads / layer.kv_heads;
  int64_t few_kv_heads = layer.kv_heads, heads = group;
  while (few_kv_heads > 1 && batch.sequences * (layer.kv_heads / few_kv_heads) < threads)
    few_kv_heads = (few_kv_heads + 1) / 2;
  while (heads > 4 && batch.sequences * layer.kv_heads * (group / heads) < threads)
    heads = (heads + 1) / 2;
  std::vector<AttentionItem> items;
  int64_t row = 0;
  for (int64_t sequence = 0; sequence < batch.sequences; sequence++) {
    const int64_t count = batch.counts ? batch.counts[sequence] : 1;
    const int64_t queries = batch.tree ? 1 : std::max<int64_t>(kMostRows / heads, 1);
    const int64_t kv_heads = std::min(queries, count) * group <= kFewRows ? few_kv_heads : 1;
    for (int64_t q = (count - 1) / queries * queries; q >= 0; q -= queries)  // the longest first
      for (int64_t n = 0; n < layer.kv_heads; n += kv_heads)
        for (int64_t h = 0; h < group; h += heads)
          items.push_back({sequence, row, count, q, std::min(queries, count - q), n,
                           std::min(kv_heads, layer.kv_heads - n), h, std::min(heads, group - h)});
    row += count;
  }
  return items;
}

template <class T>
inline void attend(AttentionLayer layer, AttentionBatch batch, AttentionRows<T> rows) {
  const int64_t key = layer.kv_heads * layer.key_width, value = layer.kv_heads * layer.value_width;
#pragma omp parallel for if (batch.rows > 64)
  for (int64_t t = 0; t < (rows.k ? batch.rows : 0); t++) {
    const int64_t slot = batch.slots[t];
    std::copy_n(rows.k + t * rows.k_stride, key, rows.keys + slot * key);
    if (rows.v) std::copy_n(rows.v + t * rows.v_stride, value, rows.values + slot * value);
  }
  const std::vector<AttentionItem> items = attention_items(layer, batch);
  const int64_t used = items.empty() ? 0 : items.back().row + items.back().count;
  const int64_t width = layer.heads * layer.value_width;
  std::fill_n(rows.out + used * width, (batch.rows - used) * width, 0);  // padding
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < items.size(); i++) {
    if (items[i].queries * items[i].heads <= 8)
      Attend<T, Floats8, Words8>{layer, batch, rows, items[i]}.run();
    else
      Attend<T, Floats, Words>{layer, batch, rows, items[i]}.run();
  }
}

void attention(AttentionLayer layer, AttentionBatch batch, AttentionRows<bf16> rows) {
  attend(layer, batch, rows);
}

void attention_float32(AttentionLayer layer, AttentionBatch batch, AttentionRows<float> rows) {
  attend(layer, batch, rows);
}
