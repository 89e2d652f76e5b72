// The functions that Python calls. C++20 with vector extensions.
//
// `library.py` compiles this file; the other modules of this folder call it, and document shapes and meanings.

#include "growth.h"

#include <string_view>

namespace {

// A function without a result as Python calls it: it returns whether there was memory enough.
template <auto function, typename... Arguments>
int64_t call(Arguments... arguments) {
  try {
    function(arguments...);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

template <auto function>
const void* at() {
  return []<typename... Arguments>(void (*)(Arguments...)) {
    return reinterpret_cast<const void*>(&call<function, Arguments...>);
  }(function);
}

// Return the function of a name, for tensors of type T if it differs between them; null if there is none.
template <typename T>
const void* find(std::string_view name) {
  const std::pair<std::string_view, const void*> functions[] = {
      {"make_team", reinterpret_cast<const void*>(make_team)},
      {"free_team", at<free_team>()},
#ifdef TITAN_HAS_CODES
      {"make_codes_8", at<make_codes<Codes<8>>>()},
      {"make_codes_12", at<make_codes<Codes<12>>>()},
#endif
      {"linear", at<run_linear<T>>()},
      {"unpack_rows", at<unpack_rows<T>>()},
      {"rms_norm", at<run_norm<T>>()},
      {"rope_and_write_kv", at<run_rope<T>>()},
      {"write_rows", at<write_rows<T>>()},
      {"tree_attention", at<run_attention<T>>()},
      {"gated_mlp", at<gated_mlp<T>>()},
      {"forward", at<forward<T>>()},
      {"argmax", at<argmax<T>>()},
      {"distributions", at<distributions<T>>()},
      {"top_candidates", at<top_candidates<T>>()},
      {"sample_children", at<sample_children>()},
      {"verify_trees", at<verify_trees<T>>()},
      {"grow", at<grow<T>>()},
  };
  for (const auto& [known, address] : functions)
    if (known == name) return address;
  return nullptr;
}

} // namespace

extern "C" const void* find_function(const char* name, int64_t is_bfloat16) {
  return is_bfloat16 ? find<BFloat16>(name) : find<float>(name);
}
