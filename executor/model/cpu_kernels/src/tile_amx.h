// Products for CPUs with AMX: tiles of 16 rows x 16 columns, 2 x 2 at once; vectors are as in
// tile_avx512.h. tile.h includes it where it takes products.
//
// AMX takes a row in blocks of 32 numbers. In each it sums the products of even numbers by fused
// multiply-adds, those of odd ones likewise, adds both, and adds that to the sum so far; denormals
// are 0. Few rows, which memory keeps waiting, take the same steps by AVX512: bits are the same.

constexpr int kTileRows = 32, kFewRowsOfTile = 3, kBlock = 32;
constexpr int64_t kBlockWords = kBlock / 2 * kColumns;  // of weights

inline int64_t next_rows(int64_t left) { return std::min<int64_t>(left, kTileRows); }

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline const TileShapes kTileShapes;

// What a thread has about it that multiplies: others in this process configure AMX otherwise.
struct Configured {
  Configured() {
    asm volatile("" ::"m"(kTileShapes));  // all of it: g++ 12 holds that 8 bytes are read
    _tile_loadconfig(&kTileShapes);
  }
  Configured(const Configured&) = delete;
  ~Configured() { _tile_release(); }
};

// result [16 TILES][32] = x . weights, where x has `stride` from row to row, and get(block) returns
// a block's weights, [16][32] pairs.
template <int TILES, class Get>
inline void multiply_tiles(const bf16* x, int64_t stride, int64_t blocks, Get get, float* result) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++, x += kBlock) {
    const uint32_t* const weights = get(block);
    asm volatile("" ::: "memory");  // what is stored is there: g++ 12 holds that loads read nothing
    _tile_loadd(4, x, 2 * stride);
    _tile_loadd(6, weights, 4 * kColumns);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 16, 4 * kColumns);
    _tile_dpbf16ps(1, 4, 7);
    if (TILES == 1) continue;
    _tile_loadd(5, x + 16 * stride, 2 * stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, result, 4 * kColumns);
  _tile_stored(1, result + 16, 4 * kColumns);
  if (TILES == 1) return;
  _tile_stored(2, result + 16 * kColumns, 4 * kColumns);
  _tile_stored(3, result + 16 * kColumns + 16, 4 * kColumns);
}

// The even and the odd numbers of pairs of a panel, of columns from one on.
struct FloatPairs {
  Floats even, odd;
};
inline FloatPairs halves(Words pairs) { return {Floats(pairs << 16), Floats(pairs & 0xffff0000)}; }
inline FloatPairs halves_at(const bf16* panel, int column) {
  return halves(pairs_at(panel, column));
}
inline FloatPairs halves_at(const int8_t* panel, int column) {
  return {load(panel + column), load(panel + kColumns + column)};
}

// result [ROWS][32] = rows . panel, by AVX512. `rows` point to where each ends.
template <int ROWS, class Weight>
inline void multiply_few(const bf16* const* rows, const Weight* panel, int64_t width,
                         float* result) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // denormals are 0, round to nearest, no traps
  asm volatile("" ::: "memory");
  Floats sums[ROWS][2] = {};
  for (int64_t k = -width, end; k < 0; k = end) {
    end = k + kBlock;
    FloatPairs parts[ROWS][2] = {};
    for (; k < std::min<int64_t>(end, 0); k += 2, panel += 2 * kColumns) {
      for (int line = 0; line < 2 * kColumns * (int)sizeof(Weight); line += 64)
        _mm_prefetch((const char*)panel + 4096 + line, _MM_HINT_T0);
      for (int half = 0; half < 2; half++) {
        const FloatPairs weights = halves_at(panel, half * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
          const FloatPairs x = halves(load_as<uint32_t>(rows[i] + k) + Words{});
          FloatPairs& part = parts[i][half];
          part = {fma(x.even, weights.even, part.even), fma(x.odd, weights.odd, part.odd)};
        }
      }
    }
    const float rest = end > 0 ? 0.f : -0.f;  // AMX adds zeros past the width: -0 becomes 0
    for (int i = 0; i < ROWS; i++)
      for (int half = 0; half < 2; half++)
        sums[i][half] += (parts[i][half].even + rest) + (parts[i][half].odd + rest);
  }
  for (int i = 0; i < ROWS; i++)
    for (int half = 0; half < 2; half++)
      store(result + i * kColumns + half * kLanes, sums[i][half]);
  asm volatile("" ::: "memory");
  _mm_setcsr(mode);
}

// result = rows . panel by AMX. Rows that do not lie evenly, are too few or too short are copied;
// so are the last block, if it is too short, and int8, widened, where the panel `is_new`.
template <class Weight>
inline void multiply_many(const bf16* const* rows, int64_t count, const Weight* panel,
                          int64_t width, bool is_new, float* result) {
  const int64_t blocks = (width + kBlock - 1) / kBlock, whole = width / kBlock;
  const bf16* x = rows[0] - width;
  int64_t stride = rows[1] - rows[0];
  bool fits = count % 16 == 0 && blocks == whole;
  for (int64_t i = 0; i < count; i++) fits &= rows[i] - rows[0] == i * stride;
  if (!fits) {
    stride = (blocks + 1) * kBlock;  // one more: rows are not all in the same lines of the cache
    bf16* const copy = scratch<bf16, 1>(kTileRows * stride);
    for (int64_t i = 0; i < count; i++) {
      std::copy_n(rows[i] - width, width, copy + i * stride);
      std::fill_n(copy + i * stride + width, blocks * kBlock - width, 0);
    }
    x = copy;
  }
  constexpr bool kIsInt8 = sizeof(Weight) == 1;
  const bool copies_weights = kIsInt8 || blocks > whole;
  uint32_t* const copies = scratch<uint32_t, 2>(copies_weights ? blocks * kBlockWords : 0);
  const auto get = [&](int64_t block) {
    const Weight* const weights = panel + 2 * kBlockWords * block;
    if (count <= 16 && is_new)
      for (int line = 0; line < 2 * kBlockWords * (int)sizeof(Weight); line += 64)
        _mm_prefetch((const char*)weights + 16384 + line, _MM_HINT_T0);
    if (!kIsInt8 && block < whole) return (const uint32_t*)weights;
    uint32_t* const copy = copies + kBlockWords * block;
    const int64_t pairs = std::min<int64_t>(width / 2 - kBlock / 2 * block, kBlock / 2);
    for (int64_t k = 0; is_new && k < pairs; k++)
      for (int c = 0; c < kColumns; c += kLanes)
        store(copy + k * kColumns + c, pairs_at(weights + 2 * kColumns * k, c));
    if (is_new) std::fill(copy + pairs * kColumns, copy + kBlockWords, 0);
    return (const uint32_t*)copy;
  };
  count > 16 ? multiply_tiles<2>(x, stride, blocks, get, result)
             : multiply_tiles<1>(x, stride, blocks, get, result);
}

// result = rows . panel * scales + bias; scales of int8 only. `rows` point to where each ends.
template <class Weight>
inline void product(const bf16* const* rows, int64_t count, const Weight* panel,
                    const float* scales, const float* bias, int64_t width, bool is_new,
                    float* result) {
  if (count <= kFewRowsOfTile)
    with_constant<kFewRowsOfTile>(count, [&](auto constant) {
      multiply_few<decltype(constant)::value>(rows, panel, width, result);
    });
  else
    multiply_many(rows, count, panel, width, is_new, result);
  for (int64_t i = 0; i < count; i++)
    for (int c = 0; c < kColumns; c += kLanes) {
      float* const at = result + i * kColumns + c;
      const Floats sums = load(at);
      store(at, (scales ? sums * load(scales + c) : sums) + load(bias + c));
    }
}
