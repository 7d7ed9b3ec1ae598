#include "target/lost_device.hpp"

#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <mutex>

namespace eagle3 {
namespace {

// The message begins with the file of ggml that gave up.
bool is_of_device(const char * message) {
    for (const char * backend :
        {"ggml-cuda", "ggml-hip", "ggml-metal", "ggml-vulkan", "ggml-sycl", "ggml-rpc"}) {
        if (strstr(message, backend)) {
            return true;
        }
    }
    return false;
}

void gave_up(const char * message) {
    if (is_of_device(message)) {
        fprintf(stderr,
            "eagle3-llama: the device has failed, which ends this process: start it again; eagle3-llama info "
            "--system shows the devices that are left (%s)\n",
            message);
    } else {
        ggml_set_abort_callback(nullptr);  // ggml shows the trace
        ggml_abort("ggml", 0, "%s", message);
    }
}

}  // namespace

void tell_of_lost_devices() {
    static std::once_flag once;
    std::call_once(once, [] {
        if (const ggml_abort_callback_t other = ggml_set_abort_callback(gave_up)) {
            ggml_set_abort_callback(other);
        }
    });
}

}  // namespace eagle3
