// The activations of the kernels and their derivatives, one at a time: FL_ACT says which, 0 none, 1 relu, 2 relu_tie, 3 relu_where,
// 4 gelu_tanh, 5 gelu_erf, 6 silu, 7 sigmoid, 8 tanh. Arithmetic is in C (float or double); FL_16BIT is 1 where what is stored has 16 bits,
// FL_T is 3 where it is double. FL_HAS_EXP2 says that there is an `exp2_of` already.
//
// The meanings are those of activations.py, NaN, infinities and ties included. The formulas of the derivatives use what is small where
// the textbook's difference cancels: sigma(-|h|) = e/(1+e) with e = exp(-|h|), so that sigma (1 - sigma) = e/(1+e)^2.
#pragma once

#define FL_NONE 0
#define FL_RELU 1
#define FL_RELU_TIE 2
#define FL_RELU_WHERE 3
#define FL_GELU_TANH 4
#define FL_GELU_ERF 5
#define FL_SILU 6
#define FL_SIGMOID 7
#define FL_TANH 8

// The functions of the activations. With 16-bit storage exponential and reciprocal are the special function unit's (relative error
// below 2^-22), else the accurate ones.
#if FL_16BIT
constexpr double kLog2E = 1.4426950408889634;

// 2^x and 1/x; the host path is for tests that compile this file as C++.
#ifndef FL_HAS_EXP2
__device__ __forceinline__ float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
#endif

__device__ __forceinline__ C inverse(C x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

constexpr float kExp = static_cast<float>(kLog2E); // exp(x) is exp_of(kExp x): the factor goes into another constant
__device__ __forceinline__ C exp_of(C x) { return exp2_of(x); }
#else
constexpr C kExp = 1;
#if FL_T == 3
__device__ __forceinline__ C inverse(C x) { return 1.0 / x; }
__device__ __forceinline__ C exp_of(C x) { return exp(x); }
__device__ __forceinline__ C erfc_of(C x) { return erfc(x); }
__device__ __forceinline__ C tanh_of(C x) { return tanh(x); }
#else
__device__ __forceinline__ C inverse(C x) { return 1.0f / x; }
__device__ __forceinline__ C exp_of(C x) { return expf(x); }
__device__ __forceinline__ C erfc_of(C x) { return erfcf(x); }
__device__ __forceinline__ C tanh_of(C x) { return tanhf(x); }
#endif
#endif

// f(h) of f(-|h|), for an f with f(h) + f(-h) = 1.
__device__ __forceinline__ C of_tail(C h, C tail) { return fabs((h > C(0) ? C(1) : C(0)) - tail); }

// f(-|h|) of a sigmoid f = 1 / (1 + exp(-w)), and 1 - f(-|h|).
struct Sigmoid {
  C tail, rest;
};
__device__ __forceinline__ Sigmoid sigmoid_of(C scaled) { // scaled: kExp w
  const C e = exp_of(-fabs(scaled));
  const C rest = inverse(C(1) + e);
  return {e * rest, rest};
}

// tanh-GELU is h sigmoid(w) with w = 2 sqrt(2/pi) (h + 0.044715 h^3) = h (kTanh1 + kTanh3 h^2).
constexpr double kTanh1 = 1.5957691216057308;
constexpr double kTanh3 = 0.044715 * kTanh1;
__device__ __forceinline__ C gelu_w(C h) { // kExp w
  return h * (C(kTanh1 * kExp) + C(kTanh3 * kExp) * (h * h));
}

// The distribution function of the normal distribution, Phi(h), and exp(-h^2/2).
struct Normal {
  C phi, bell;
};
#if FL_16BIT
// Phi(-a) = exp(-a^2/2) t P(t) with t = 1 / (1 + kMillsScale a): the form of Abramowitz and Stegun 7.1.26, here fitted to the relative
// error (Lawson's iteration; tests/kernels/test_epilogue_math.py fits it again): below 4.1e-6 for a up to 13.5, where Phi(-a)
// leaves the range of float. So gelu keeps its relative error in the negative tail too.
constexpr float kMillsScale = 0.30852174f;
constexpr float kMills[6] = {0.12331635f, 0.11927338f, 0.13579474f, 0.0093281f, 0.18739235f, -0.07510692f};
__device__ __forceinline__ Normal normal_of(C h) {
  const float bell = exp2_of(h * h * static_cast<float>(-0.5 * kLog2E));
  const float t = inverse(1.0f + kMillsScale * fabsf(h));
  float p = kMills[5];
#pragma unroll
  for (int i = 4; i >= 0; --i) p = p * t + kMills[i];
  return {of_tail(h, p * t * bell), bell};
}
#else
__device__ __forceinline__ Normal normal_of(C h) {
  return {C(0.5) * erfc_of(h * C(-0.7071067811865476)), exp_of(C(-0.5) * h * h)};
}
#endif

#if FL_16BIT
// (1 - e) / (1 + e) loses its leading digits near 0; h - h^3/3 is within 2e-6 there.
__device__ __forceinline__ C tanh_of(C h) {
  const float e = exp2_of(static_cast<float>(-2 * kLog2E) * fabsf(h));
  const float far = copysignf((1.0f - e) * inverse(1.0f + e), h);
  const float near = h + h * (h * h * (-1.0f / 3.0f));
  return fabsf(h) < 0.0625f ? near : far;
}
#endif

__device__ __forceinline__ C activation(C h) {
#if FL_ACT == FL_NONE
  return h;
#elif FL_ACT == FL_RELU || FL_ACT == FL_RELU_TIE
  return h <= C(0) ? C(0) : h; // NaN stays NaN
#elif FL_ACT == FL_RELU_WHERE
  return h > C(0) ? h : C(0);
#elif FL_ACT == FL_GELU_TANH
  return h * inverse(C(1) + exp_of(-gelu_w(h)));
#elif FL_ACT == FL_GELU_ERF
  return h * normal_of(h).phi;
#elif FL_ACT == FL_SILU
  return h * inverse(C(1) + exp_of(-kExp * h));
#elif FL_ACT == FL_SIGMOID
  return inverse(C(1) + exp_of(-kExp * h));
#elif FL_ACT == FL_TANH
  return tanh_of(h);
#endif
}

__device__ __forceinline__ C slope(C h) {
#if FL_ACT == FL_NONE
  return C(1);
#elif FL_ACT == FL_RELU || FL_ACT == FL_RELU_WHERE
  return h > C(0) ? C(1) : C(0);
#elif FL_ACT == FL_RELU_TIE
  return h > C(0) ? C(1) : h == C(0) ? C(0.5) : C(0);
#elif FL_ACT == FL_GELU_TANH
  const Sigmoid s = sigmoid_of(gelu_w(h));
  // As jnp's, NaN where h^2 overflows.
  return of_tail(h, s.tail) + h * (s.tail * s.rest * (C(kTanh1) + C(3 * kTanh3) * (h * h)));
#elif FL_ACT == FL_GELU_ERF
  const Normal n = normal_of(h);
  return n.phi + h * (n.bell * C(0.3989422804014327)); // 1 / sqrt(2 pi)
#elif FL_ACT == FL_SILU
  const Sigmoid s = sigmoid_of(kExp * h);
  return of_tail(h, s.tail) + h * (s.tail * s.rest);
#elif FL_ACT == FL_SIGMOID
  const Sigmoid s = sigmoid_of(kExp * h);
  return s.tail * s.rest;
#elif FL_ACT == FL_TANH
  const Sigmoid s = sigmoid_of(C(2) * kExp * h);
  return C(4) * (s.tail * s.rest);
#endif
}
