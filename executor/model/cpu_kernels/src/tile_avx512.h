// Tile for CPUs with AVX512 and its dot product of bfloat16 pairs. See tile.h.
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // x 2 sums, two vectors of weights and a row's pair: 27 of 32 registers

using Floats = Lanes<kLanes>::Floats;
using Words = Lanes<kLanes>::Words;

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b if either is NaN
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void store(bf16* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}

// sums + pair . pairs, in each lane.
inline Floats dot(Floats sums, uint32_t pair, Words pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
inline Lanes<8>::Floats dot(Lanes<8>::Floats sums, uint32_t pair, Lanes<8>::Words pairs) {
  return _mm256_dpbf16_ps(sums, (__m256bh)_mm256_set1_epi32(pair), (__m256bh)pairs);
}

// Pairs of numbers that bfloat16 has, to take dot products with.
inline Words pairs_of(Floats even, Floats odd) { return Words(even) >> 16 | Words(odd); }

// Pairs (even[i], odd[i]) of 32 columns.
inline void pair_rows(const bf16* even, const bf16* odd, Words (&pairs)[2]) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  pairs[0] = (Words)_mm512_permutex2var_epi16(a, low, b);
  pairs[1] = (Words)_mm512_permutex2var_epi16(a, high, b);
}
