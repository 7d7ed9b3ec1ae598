// Counts a program's calls of NVIDIA's runtime library, and the time in them: LD_PRELOAD=libcuda_calls.so.
// pack.py compiles it, and the step rows of run_on_card.py reads it. It stands before the functions that copy,
// wait, launch and allocate, so no header of NVIDIA's is needed: enumerations are int, handles are pointers.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum call {
    COPIES_IN,
    COPIES_OUT,
    COPIES_ON_DEVICE,
    STREAM_WAITS,
    EVENT_WAITS,
    GRAPH_LAUNCHES,
    GRAPHS_MADE,
    ALLOCATIONS,
    N_CALLS,
};

// of cuda_calls_read: a number and microseconds for each, then the bytes of the first three
static const char NAMES[] = "copies_in copies_out copies_on_device stream_waits event_waits graph_launches graphs_made "
                            "allocations";

static _Atomic uint64_t numbers[N_CALLS], nanoseconds[N_CALLS], bytes[3];

const char * cuda_calls_names(void) {
    return NAMES;
}

// out: 2 * N_CALLS + 3 numbers since cuda_calls_reset
void cuda_calls_read(uint64_t * out) {
    for (int i = 0; i < N_CALLS; ++i) {
        out[i]           = numbers[i];
        out[N_CALLS + i] = nanoseconds[i] / 1000;
    }
    for (int i = 0; i < 3; ++i) {
        out[2 * N_CALLS + i] = bytes[i];
    }
}

void cuda_calls_reset(void) {
    for (int i = 0; i < N_CALLS; ++i) {
        numbers[i] = nanoseconds[i] = 0;
    }
    for (int i = 0; i < 3; ++i) {
        bytes[i] = 0;
    }
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

// the library is there already, as its functions are called; RTLD_NEXT would not see one that dlopen brought
static void * real(const char * name) {
    void * library = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}

#define COUNTED(WHICH, NAME, PARAMETERS, ARGUMENTS)      \
    int NAME PARAMETERS {                                \
        static int (*function) PARAMETERS;               \
        if (!function) {                                 \
            function = (int(*) PARAMETERS) real(#NAME);  \
        }                                                \
        if (!function) {                                 \
            return 999; /* cudaErrorUnknown */           \
        }                                                \
        const enum call which = WHICH;                   \
        const uint64_t start  = now();                   \
        const int error       = function ARGUMENTS;      \
        nanoseconds[which] += now() - start;             \
        ++numbers[which];                                \
        return error;                                    \
    }

// cudaMemcpyKind: 1 is to the device, 2 from it
static enum call copy(int kind, size_t size) {
    const enum call which = kind == 1 ? COPIES_IN : kind == 2 ? COPIES_OUT : COPIES_ON_DEVICE;
    bytes[which] += size;
    return which;
}

COUNTED(copy(kind, size), cudaMemcpyAsync, (void * to, const void * from, size_t size, int kind, void * stream),
    (to, from, size, kind, stream))
COUNTED(copy(kind, size), cudaMemcpy, (void * to, const void * from, size_t size, int kind), (to, from, size, kind))
COUNTED(STREAM_WAITS, cudaStreamSynchronize, (void * stream), (stream))
COUNTED(EVENT_WAITS, cudaEventSynchronize, (void * event), (event))
COUNTED(GRAPH_LAUNCHES, cudaGraphLaunch, (void * graph, void * stream), (graph, stream))
COUNTED(GRAPHS_MADE, cudaGraphInstantiate, (void ** out, void * graph, unsigned long long flags), (out, graph, flags))
COUNTED(ALLOCATIONS, cudaMalloc, (void ** out, size_t size), (out, size))
