// A device for tests on any machine: ggml's RPC backend with counters in its calls, which can also refuse buffers.
// tests/kit/rpc_device.py compiles this file together with ggml/src/ggml-rpc, serves the CPU in a child process, and
// registers the device here.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-rpc.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

// what is counted: calls and, where data travels, bytes
enum count {
    BLOCKING_IN,     // set_tensor: the caller waits until the data has been sent
    BLOCKING_OUT,    // get_tensor: the caller waits until the data is there
    ASYNC_IN,        // set_tensor_async
    ASYNC_OUT,       // get_tensor_async
    COPIES,          // from tensor to tensor on the device
    SYNCHRONIZE,     // waits for all that was queued, those for an event too
    WAITS,           // the host waited: a blocking copy, or a synchronize after something was queued
    GRAPHS,          // graphs that were queued
    BUFFERS,         // buffers that were asked for
    BLOCKING_IN_BYTES,
    BLOCKING_OUT_BYTES,
    ASYNC_IN_BYTES,
    ASYNC_OUT_BYTES,
    N_COUNTS,
};

static const char * const NAMES =
    "blocking_in blocking_out async_in async_out copies synchronize waits graphs buffers "
    "blocking_in_bytes blocking_out_bytes async_in_bytes async_out_bytes";

static std::atomic<uint64_t> counts[N_COUNTS];
static std::atomic<uint64_t> largest{UINT64_MAX};  // bytes of a buffer that can still be had
static std::atomic<int64_t> left{INT64_MAX};       // buffers that can still be had

static std::atomic<bool> busy{false};               // something is queued that nobody has waited for

static void counted(count what, uint64_t n = 1) {
    counts[what] += n;
    switch (what) {
    case BLOCKING_IN:
        counts[WAITS] += n;
        break;
    case BLOCKING_OUT:
        counts[WAITS] += n;
        busy = false;
        break;
    case SYNCHRONIZE:
        counts[WAITS] += busy.exchange(false);
        break;
    case ASYNC_IN:
    case ASYNC_OUT:
    case GRAPHS:
        busy = true;
        break;
    default:
        break;
    }
}

// -- buffers: each has its own table of functions, a copy of the RPC backend's ----------------------------------

static ggml_backend_buffer_i rpc_buffer;  // the RPC backend's own
static std::mutex mutex;

static void set_tensor(ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    counted(BLOCKING_IN);
    counted(BLOCKING_IN_BYTES, size);
    rpc_buffer.set_tensor(b, t, data, offset, size);
}

static void get_tensor(ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    counted(BLOCKING_OUT);
    counted(BLOCKING_OUT_BYTES, size);
    rpc_buffer.get_tensor(b, t, data, offset, size);
}

static bool cpy_tensor(ggml_backend_buffer_t b, const ggml_tensor * src, ggml_tensor * dst) {
    const bool done = rpc_buffer.cpy_tensor(b, src, dst);
    counted(COPIES, done);
    return done;
}

static std::map<ggml_backend_buffer_type_t, ggml_backend_buffer_type_i> rpc_types;

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    counted(BUFFERS);
    if (size > largest || left-- <= 0) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_buffer_t b = rpc_types.at(type).alloc_buffer(type, size);
    if (b) {
        rpc_buffer          = b->iface;
        b->iface.set_tensor = set_tensor;
        b->iface.get_tensor = get_tensor;
        b->iface.cpy_tensor = cpy_tensor;
    }
    return b;
}

// -- backends ---------------------------------------------------------------------------------------------------

static ggml_backend_i rpc_backend;

static void set_tensor_async(ggml_backend_t b, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    counted(ASYNC_IN);
    counted(ASYNC_IN_BYTES, size);
    rpc_backend.set_tensor_async(b, t, data, offset, size);
}

static void get_tensor_async(ggml_backend_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    counted(ASYNC_OUT);
    counted(ASYNC_OUT_BYTES, size);
    rpc_backend.get_tensor_async(b, t, data, offset, size);
}

static void synchronize(ggml_backend_t b) {
    counted(SYNCHRONIZE);
    rpc_backend.synchronize(b);
}

// The server forgets its last graph when a buffer is freed, and ends if it is asked to run that again, which a
// graph with a number makes the client do.
static ggml_status graph_compute(ggml_backend_t b, ggml_cgraph * graph) {
    counted(GRAPHS);
    const uint64_t uid       = graph->uid;
    graph->uid               = 0;
    const ggml_status status = rpc_backend.graph_compute(b, graph);
    graph->uid               = uid;
    return status;
}

// -- the device -------------------------------------------------------------------------------------------------

static ggml_backend_device_i rpc_device;

static ggml_backend_t init_backend(ggml_backend_dev_t dev, const char * params) {
    ggml_backend_t b = rpc_device.init_backend(dev, params);
    if (b) {
        rpc_backend               = b->iface;
        b->iface.set_tensor_async = set_tensor_async;
        b->iface.get_tensor_async = get_tensor_async;
        b->iface.synchronize      = synchronize;
        b->iface.graph_compute    = graph_compute;
    }
    return b;
}

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t type = rpc_device.get_buffer_type(dev);
    const std::lock_guard<std::mutex> lock(mutex);
    if (rpc_types.emplace(type, type->iface).second) {
        type->iface.alloc_buffer = alloc_buffer;
    }
    return type;
}

static void event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    counted(SYNCHRONIZE);
    rpc_device.event_synchronize(dev, event);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// The names of the counters, in the order of counted_device_read.
EXPORT const char * counted_device_names() {
    return NAMES;
}

EXPORT void counted_device_read(uint64_t * out) {
    for (int i = 0; i < N_COUNTS; ++i) {
        out[i] = counts[i];
    }
}

EXPORT void counted_device_reset() {
    for (auto & c : counts) {
        c = 0;
    }
}

// From now on no buffer above so many bytes can be had, and no more than so many buffers.
EXPORT void counted_device_limit(uint64_t bytes, int64_t buffers) {
    largest = bytes;
    left    = buffers;
}

// Registers the device that is served at host:port, or only finds it if that was done. To be unregistered with
// ggml_backend_unload, it names this server as its backend.
EXPORT ggml_backend_reg_t counted_device_register(const char * endpoint) {
    ggml_backend_reg_t reg = ggml_backend_rpc_add_server(endpoint);
    for (size_t i = 0; reg && i < ggml_backend_reg_dev_count(reg); ++i) {
        ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, i);
        if (dev->iface.init_backend != init_backend) {
            rpc_device                   = dev->iface;
            dev->iface.init_backend      = init_backend;
            dev->iface.get_buffer_type   = get_buffer_type;
            dev->iface.event_synchronize = event_synchronize;
            dev->reg                     = reg;
        }
    }
    if (reg) {
        ggml_backend_register(reg);
    }
    return reg;
}

// Serves the CPU at host:port, to one client at a time, with one thread. It returns where that is impossible.
EXPORT void counted_device_serve(const char * endpoint) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_rpc_start_server(endpoint, nullptr, 1, 1, &cpu);
}
