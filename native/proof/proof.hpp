// What the parts of eagle3-proof share.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <random>
#include <string>
#include <vector>

constexpr int WRONG = 1, ROWS_DIFFER = 3, CANNOT = 4;  // exit codes; native/proof.py has them too

extern bool stock;  // an unpatched library, whose rows need not be alike
extern bool few;    // fewer rows and tokens, for a library with sanitizers
extern std::mt19937 rng;

void begin(const std::string & step);
[[noreturn]] void end(int code, const std::string & what);
std::vector<float> random_floats(size_t n, float size);  // in [-size, size]
ggml_backend_dev_t cpu();
void check_same(const float * a, const float * b, size_t n, int rows);  // goes on; main says it at the end

void check_all_products();
void check_generation(ggml_type type);
