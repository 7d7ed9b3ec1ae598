// Proves on this processor what a decode needs of the CPU backend: eagle3-proof [--stock] [--few] [FILE]
//                                                                   eagle3-proof --score FILE
//
// FILE: a CPU backend that is loaded when it is needed (CMake's EAGLE3_VARIANTS).
// Says what it begins, a line each, and at the end "ok". It ends with 0 or with a code of proof.hpp, and on
// stderr says what differs. --score: prints how well the backend suits this processor, 0 for not at all.
#include "proof.hpp"

#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#ifndef _WIN32
#include <dlfcn.h>
#include <sys/resource.h>
#endif
#include <unistd.h>

bool stock = false, few = false;
std::mt19937 rng(1);

static std::string current, differing;  // the step, and the first in which rows differ

// Where a limit of computing is set (eagle3_llama/runtime/checking.py), each step has it anew.
static void renew_limit() {
#ifndef _WIN32
    static rlim_t each = 0;
    rlimit limit;
    rusage used;
    if (getrlimit(RLIMIT_CPU, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        getrusage(RUSAGE_SELF, &used) == 0) {
        each           = each ? each : limit.rlim_cur;
        rlim_t so_far  = (rlim_t) (used.ru_utime.tv_sec + used.ru_stime.tv_sec + 1);
        limit.rlim_cur = std::min(limit.rlim_max, so_far + each);
        setrlimit(RLIMIT_CPU, &limit);
    }
#endif
}

void begin(const std::string & step) {
    renew_limit();
    current = step;
    std::printf("%s\n", step.c_str());
    std::fflush(stdout);
}

[[noreturn]] void end(int code, const std::string & what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::fflush(stderr);
    _exit(code);  // no destructor hides the reason
}

std::vector<float> random_floats(size_t n, float size) {
    std::vector<float> out(n);
    for (float & x : out) {
        x = size * ((float) (rng() % 20001) / 10000.0f - 1.0f);
    }
    return out;
}

ggml_backend_dev_t cpu() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return dev ? dev : (end(CANNOT, "ggml has no CPU backend"), nullptr);
}

void check_same(const float * a, const float * b, size_t n, int rows) {
    if (!stock && differing.empty() && std::memcmp(a, b, n * sizeof(float)) != 0) {
        differing = current + ": rows differ when " + std::to_string(rows) + " are computed together";
    }
}

// What ggml itself chooses by. Only the code that reads the processor's features runs.
static int score(const char * file) {
#ifdef _WIN32
    end(CANNOT, std::string(file) + ": on Windows a library has one CPU backend");
#else
    void * handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    auto told     = (int (*)())(handle ? dlsym(handle, "ggml_backend_score") : nullptr);
    if (!told) {
        end(CANNOT, dlerror());
    }
    std::printf("%d\n", told());
    return 0;
#endif
}

int main(int argc, char ** argv) {
    const char * file = nullptr;
    bool scored       = false;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        stock                  = stock || word == "--stock";
        few                    = few || word == "--few";
        scored                 = scored || word == "--score";
        if (word.rfind("--", 0) != 0) {
            file = argv[i];
        }
    }
    if (scored) {
        return file ? score(file) : (end(CANNOT, "--score needs a file"), 1);
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (file) {
        begin("the start");
        if (!ggml_backend_load(file)) {
            end(WRONG, std::string(file) + " is no CPU backend for this processor");
        }
    } else {
        ggml_backend_load_all();
    }
    check_all_products();
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K}) {
        check_generation(type);
    }
    if (!differing.empty()) {
        end(ROWS_DIFFER, differing);
    }
    begin("ok");
    return 0;
}
