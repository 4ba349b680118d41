// Tile for CPUs with AVX2 and FMA: bfloat16 widened to float32, by a shift or a mask. See tile.h.
constexpr int kTileRows = 4;  // x 2 sums, four vectors of weights, a row's pair: 14 of 16 registers

typedef bf16 Halves __attribute__((vector_size(2 * kLanes)));

inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }  // b if either is NaN
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }

inline Floats swap_halves(Floats x) { return _mm256_permute2f128_ps(x, x, 1); }
inline float sum(Floats x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline Floats load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
}

// Each number in the low half of a word; rounded to the nearest, halves to even; NaN stays NaN.
inline Words widen(const bf16* p) { return (Words)_mm256_cvtepu16_epi32(load_as<__m128i>(p)); }
inline Words rounded(Floats x) {
  const Words bits = Words(x), nearest = bits + (bits >> 16 & 1) + 0x7fff;
  return (x == x ? nearest : bits | 0x400000) >> 16;
}
inline void store(bf16* p, Floats x) { store(p, __builtin_convertvector(rounded(x), Halves)); }

inline Floats even(Words pairs) { return Floats(pairs << 16); }
inline Floats odd(Words pairs) { return Floats(pairs & 0xffff0000); }

// Pairs of numbers that bfloat16 has, to take dot products with.
struct FloatPairs {
  Floats even, odd;
};
inline FloatPairs pairs_of(Floats even, Floats odd) { return {even, odd}; }

// sums + pair . pairs, in each lane.
inline Floats dot(Floats sums, uint32_t pair, FloatPairs pairs) {
  const Words x = (Words)_mm256_set1_epi32(pair);
  return fma(odd(x), pairs.odd, fma(even(x), pairs.even, sums));
}
inline Floats dot(Floats sums, uint32_t pair, Words pairs) {
  return dot(sums, pair, pairs_of(even(pairs), odd(pairs)));
}

// Pairs (even[i], odd[i]) of 16 columns.
inline void pair_rows(const bf16* even, const bf16* odd, Words (&pairs)[2]) {
  for (int i = 0; i < 2; i++) pairs[i] = widen(even + 8 * i) | widen(odd + 8 * i) << 16;
}
