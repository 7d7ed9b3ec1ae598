// This gives typed access to the keys of a GGUF. Nothing in the file is trusted: types and ranges are checked
// here.
#pragma once

#include "error.hpp"

#include "ggml-cpp.h"
#include "gguf.h"

#include <cinttypes>
#include <cmath>
#include <string>
#include <vector>

namespace eagle3 {

struct metadata {
    gguf_context_ptr gguf;

    int64_t find(const std::string & key) const { return gguf_find_key(gguf.get(), key.c_str()); }

    static bool is_int(gguf_type t) {
        return t == GGUF_TYPE_UINT32 || t == GGUF_TYPE_INT32 || t == GGUF_TYPE_UINT64 || t == GGUF_TYPE_INT64;
    }

    int64_t integer_at(int64_t id) const {
        switch (gguf_get_kv_type(gguf.get(), id)) {
        case GGUF_TYPE_UINT32:
            return gguf_get_val_u32(gguf.get(), id);
        case GGUF_TYPE_INT32:
            return gguf_get_val_i32(gguf.get(), id);
        case GGUF_TYPE_UINT64:
            return (int64_t) gguf_get_val_u64(gguf.get(), id);
        default:
            return gguf_get_val_i64(gguf.get(), id);
        }
    }

    // Returns an integer in lo..hi, or `missing` if the key is absent; it throws if that is negative or out
    // of range.
    int integer(const std::string & key, int64_t lo, int64_t hi, int missing = -1) const {
        const int64_t id = find(key);
        if (id < 0) {
            require(missing >= 0, EAGLE3_E_FORMAT, "key " + key + " is missing");
            require(missing >= lo && missing <= hi, EAGLE3_E_FORMAT,
                format("key %s is missing, and would be %d, expected %" PRId64 "..%" PRId64, key.c_str(),
                    missing, lo, hi));
            return missing;
        }
        require(
            is_int(gguf_get_kv_type(gguf.get(), id)), EAGLE3_E_FORMAT, "key " + key + " is not an integer");
        const int64_t v = integer_at(id);
        require(v >= lo && v <= hi, EAGLE3_E_FORMAT,
            format("key %s is %" PRId64 ", expected %" PRId64 "..%" PRId64, key.c_str(), v, lo, hi));
        return (int) v;
    }

    float real(const std::string & key, float missing) const {
        const int64_t id = find(key);
        if (id < 0) {
            return missing;
        }
        require(gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_FLOAT32, EAGLE3_E_FORMAT,
            "key " + key + " is not a float");
        const float v = gguf_get_val_f32(gguf.get(), id);
        require(
            std::isfinite(v) && v >= 0.0f, EAGLE3_E_FORMAT, "key " + key + " is not a finite number >= 0");
        return v;
    }

    bool boolean(const std::string & key, bool missing = false) const {
        const int64_t id = find(key);
        if (id < 0) {
            return missing;
        }
        require(gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_BOOL, EAGLE3_E_FORMAT,
            "key " + key + " is not a boolean");
        return gguf_get_val_bool(gguf.get(), id);
    }

    std::string string(const std::string & key) const {
        const int64_t id = find(key);
        if (id < 0 || gguf_get_kv_type(gguf.get(), id) != GGUF_TYPE_STRING) {
            return "";
        }
        return gguf_get_val_str(gguf.get(), id);
    }

    std::vector<int32_t> integers(const std::string & key) const {
        std::vector<int32_t> out;
        const int64_t id = find(key);
        if (id < 0) {
            return out;
        }
        const bool is_array = gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_ARRAY;
        const gguf_type t   = is_array ? gguf_get_arr_type(gguf.get(), id) : GGUF_TYPE_COUNT;
        require(t == GGUF_TYPE_INT32 || t == GGUF_TYPE_UINT32, EAGLE3_E_FORMAT,
            "key " + key + " is not a list of integers");
        const size_t n = gguf_get_arr_n(gguf.get(), id);
        require(n >= 1 && n <= EAGLE3_MAX_LAYERS, EAGLE3_E_FORMAT,
            format("key %s has %zu entries, expected 1..%d", key.c_str(), n, EAGLE3_MAX_LAYERS));
        const int32_t * data = (const int32_t *) gguf_get_arr_data(gguf.get(), id);
        out.assign(data, data + n);
        return out;
    }
};

}  // namespace eagle3
