// The functions that Python calls, most of them for every type of tensor. C++20 with vector extensions.
//
// `library.py` compiles this file; the other modules of this folder call it, and document shapes and meanings.

#include "attention.h"
#include "decoder.h"
#include "growth.h"
#include "layer.h"
#include "linear.h"
#include "mlp.h"
#include "sampling.h"

TITAN_DEFINE_ATTENTION(float, float, float32)
TITAN_DEFINE_ATTENTION(BFloat16, BFloat16, bfloat16)
TITAN_DEFINE_ATTENTION(float, int8_t, int8_float32)
TITAN_DEFINE_ATTENTION(BFloat16, int8_t, int8_bfloat16)

TITAN_DEFINE_KV_WRITES(float, float, float32)
TITAN_DEFINE_KV_WRITES(BFloat16, BFloat16, bfloat16)
TITAN_DEFINE_KV_WRITES(float, int8_t, int8_float32)
TITAN_DEFINE_KV_WRITES(BFloat16, int8_t, int8_bfloat16)
TITAN_DEFINE_LAYER(float, float32)
TITAN_DEFINE_LAYER(BFloat16, bfloat16)

TITAN_DEFINE_ROPE(float, float, float32)
TITAN_DEFINE_ROPE(BFloat16, BFloat16, bfloat16)
TITAN_DEFINE_ROPE(float, int8_t, int8_float32)
TITAN_DEFINE_ROPE(BFloat16, int8_t, int8_bfloat16)

TITAN_DEFINE_LINEAR(float, float32)
TITAN_DEFINE_LINEAR(BFloat16, bfloat16)

TITAN_DEFINE_MLP(float, float32)
TITAN_DEFINE_MLP(BFloat16, bfloat16)

TITAN_DEFINE_DECODER(float, float32)
TITAN_DEFINE_DECODER(BFloat16, bfloat16)

TITAN_DEFINE_GROWTH(float, float32)
TITAN_DEFINE_GROWTH(BFloat16, bfloat16)

TITAN_DEFINE_SAMPLING(float, float32)
TITAN_DEFINE_SAMPLING(BFloat16, bfloat16)
