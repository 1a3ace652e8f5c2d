/* Elementwise reductions. Each step is rounded to the element's type, as torch's operations round, so that the bits do not depend
   on who combines. 16-bit floats are combined in 32 bits and rounded to nearest even. MIN and MAX yield NaN if either side is
   NaN, and keep what is there when both are equal (which tells 0 from -0). Integers wrap around. */

#include "native.h"

#include <stdbool.h>
#include <string.h>

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Without branches, so that the loops below become vector instructions. `when`: 0 or 1. */
static inline uint32_t select(uint32_t when, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & (0 - when)); }

static inline float from_bf16(uint16_t value) { return from_bits((uint32_t)value << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)select((int32_t)(bits & 0x7fffffff) > 0x7f800000, 0x7fc0, rounded);
}

static inline float from_f16(uint16_t value) {
    uint32_t magnitude = (uint32_t)(value & 0x7fff) << 13;
    uint32_t normal = magnitude + ((127 - 15) << 23);
    uint32_t special = magnitude | 0x7f800000; /* infinity and NaN */
    /* A subnormal is its mantissa times 2^-24: put behind the point of 2^-14, which is then taken away. */
    uint32_t subnormal = to_bits(from_bits(magnitude + (113 << 23)) - from_bits(113 << 23));
    uint32_t finite = select((int32_t)magnitude < 0x0400 << 13, subnormal, normal);
    return from_bits((uint32_t)(value & 0x8000) << 16 | select((int32_t)magnitude >= 0x7c00 << 13, special, finite));
}

static inline uint16_t to_f16(float value) {
    uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff;
    uint32_t special = select((int32_t)magnitude > 0x7f800000, 0x7e00, 0x7c00);
    /* Next to 0.5 a float's last place is worth 2^-24, as a subnormal's is: the addition rounds. */
    uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t finite = select((int32_t)magnitude < 0x38800000, subnormal, normal);
    return (uint16_t)((bits >> 16 & 0x8000) | select((int32_t)magnitude >= 0x47800000, special, finite));
}

/* Wider vectors where the processor has them, chosen when the library is loaded: the same operations, so the same bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define LOOP(name, stored, expression)                                                                                                 \
    WIDE static void name(void *into, const void *other, size_t elements) {                                                                 \
        stored *restrict a = into;                                                                                                     \
        const stored *restrict b = other;                                                                                              \
        for (size_t i = 0; i < elements; i++) a[i] = (stored)(expression);                                                             \
    }

#define FLOATS(name, stored, from, to, choose)                                                                                                 \
    LOOP(sum_##name, stored, to(from(a[i]) + from(b[i])))                                                                              \
    LOOP(min_##name, stored, choose((from(b[i]) < from(a[i])) | (from(b[i]) != from(b[i])), b[i], a[i]))                               \
    LOOP(max_##name, stored, choose((from(b[i]) > from(a[i])) | (from(b[i]) != from(b[i])), b[i], a[i]))                               \
    LOOP(product_##name, stored, to(from(a[i]) * from(b[i])))                                                                          \
    static void divide_##name(stored *data, size_t elements, int divisor) {                                                            \
        for (size_t i = 0; i < elements; i++) data[i] = to(from(data[i]) / (stored##_wide)divisor);                                    \
    }

/* `wide`: an unsigned type in which sum and product are exact modulo 2^bits. */
#define INTEGERS(name, stored, wide)                                                                                                   \
    LOOP(sum_##name, stored, (wide)a[i] + (wide)b[i])                                                                                  \
    LOOP(min_##name, stored, b[i] < a[i] ? b[i] : a[i])                                                                                \
    LOOP(max_##name, stored, b[i] > a[i] ? b[i] : a[i])                                                                                \
    LOOP(product_##name, stored, (wide)a[i] * (wide)b[i])                                                                              \
    LOOP(band_##name, stored, a[i] & b[i])                                                                                             \
    LOOP(bor_##name, stored, a[i] | b[i])                                                                                              \
    LOOP(bxor_##name, stored, a[i] ^ b[i])

typedef uint16_t f16, bf16;
typedef float float_wide, f16_wide, bf16_wide;
typedef double double_wide;
#define SAME(value) (value)

#define CHOOSE(when, yes, no) ((when) ? (yes) : (no))

FLOATS(f32, float, SAME, SAME, CHOOSE)
FLOATS(f64, double, SAME, SAME, CHOOSE)
FLOATS(f16, f16, from_f16, to_f16, select)
FLOATS(bf16, bf16, from_bf16, to_bf16, select)
INTEGERS(i8, int8_t, uint32_t)
INTEGERS(u8, uint8_t, uint32_t)
INTEGERS(i16, int16_t, uint32_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(i64, int64_t, uint64_t)
LOOP(any_bool, uint8_t, (a[i] | b[i]) != 0)
LOOP(all_bool, uint8_t, (a[i] != 0) & (b[i] != 0))
LOOP(odd_bool, uint8_t, (a[i] != 0) ^ (b[i] != 0))

#define FLOAT_ROW(name) {sum_##name, min_##name, max_##name, product_##name, NULL, NULL, NULL}
#define INTEGER_ROW(name) {sum_##name, min_##name, max_##name, product_##name, band_##name, bor_##name, bxor_##name}

static tmd_combiner *const combiners[TMD_TYPES][TMD_BXOR + 1] = {
    [TMD_F32] = FLOAT_ROW(f32),    [TMD_F64] = FLOAT_ROW(f64),    [TMD_F16] = FLOAT_ROW(f16),    [TMD_BF16] = FLOAT_ROW(bf16),
    [TMD_I8] = INTEGER_ROW(i8),    [TMD_U8] = INTEGER_ROW(u8),    [TMD_I16] = INTEGER_ROW(i16),  [TMD_I32] = INTEGER_ROW(i32),
    [TMD_I64] = INTEGER_ROW(i64),
    [TMD_BOOL] = {any_bool, all_bool, any_bool, all_bool, all_bool, any_bool, odd_bool},
};

size_t tmd_element_bytes(int type) {
    static const uint8_t bytes[TMD_TYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
    return type >= 0 && type < TMD_TYPES ? bytes[type] : 0;
}

tmd_combiner *tmd_combiner_of(int type, int operation) {
    if (type < 0 || type >= TMD_TYPES || operation < 0 || operation > TMD_BXOR) return NULL;
    return combiners[type][operation];
}

void tmd_divide(int type, void *data, size_t elements, int divisor) {
    if (type == TMD_F32) divide_f32(data, elements, divisor);
    else if (type == TMD_F64) divide_f64(data, elements, divisor);
    else if (type == TMD_F16) divide_f16(data, elements, divisor);
    else if (type == TMD_BF16) divide_bf16(data, elements, divisor);
}

/* For tests: one combination, and the division of an average. Returns 0 if there is no such combination. */
TMD_API int tmd_combine_once(int type, int operation, void *into, const void *other, size_t elements, int divisor) {
    tmd_combiner *combine = tmd_combiner_of(type, operation);
    if (!combine) return 0;
    combine(into, other, elements);
    if (divisor > 1) tmd_divide(type, into, elements, divisor);
    return 1;
}
