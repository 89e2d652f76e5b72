// The functions that Python calls, most of them for every type of tensor. C++20 with vector extensions.
//
// `library.py` compiles this file; the other modules of this folder call it, and document shapes and meanings.

#include "growth.h"

// Of tensors of type T.
#define TITAN_DEFINE(T, NAME)     \
  TITAN_DEFINE_ATTENTION(T, NAME) \
  TITAN_DEFINE_LINEAR(T, NAME)    \
  TITAN_DEFINE_LAYER(T, NAME)     \
  TITAN_DEFINE_DECODER(T, NAME)   \
  TITAN_DEFINE_GROWTH(T, NAME)    \
  TITAN_DEFINE_SAMPLING(T, NAME)

TITAN_DEFINE(float, float32)
TITAN_DEFINE(BFloat16, bfloat16)
