// Calls that were made before, made again in one. library.py numbers the kernels.
#include <utility>

template <class... T, size_t... I>
inline const uint64_t* call(void (*kernel)(T...), const uint64_t* words, std::index_sequence<I...>) {
  kernel(load_as<T>(words + I)...);
  return words + sizeof...(T);
}

template <class... T>
inline void call(void (*kernel)(T...), const uint64_t*& words) {
  words = call(kernel, words, std::index_sequence_for<T...>{});
}

// words: for each call the kernel's number, then its arguments, each in the low bytes of a word.
KERNEL void replay(const uint64_t* words, int64_t calls) {
  while (calls-- > 0) switch (*words++) {
      case 0: call(add_norm, words); break;
      case 1: call(arg_max, words); break;
      case 2: call(attention, words); break;
      case 3: call(linear, words); break;
      case 4: call(moe, words); break;
      case 5: call(prepare_heads, words); break;
      case 6: call(route, words); break;
      case 7: call(silu_and_mul, words); break;
      default: return;
    }
}
