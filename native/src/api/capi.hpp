// All calls of eagle3.h turn exceptions into a code and a message. They share this.
#pragma once

#include "error.hpp"
#include "model/drafter_model.hpp"
#include "session/session.hpp"

#include <memory>
#include <new>
#include <string>

struct eagle3_head {
    std::unique_ptr<eagle3::head> impl;
};

struct eagle3_drafter {
    std::unique_ptr<eagle3::drafter_model> impl;
};

struct eagle3_session {
    std::unique_ptr<eagle3::session> impl;
};

struct eagle3_text_memory {
    std::shared_ptr<eagle3::text_memory> impl;  // slots hold it, too
};

namespace eagle3 {

// Keeps the message for eagle3_last_error, and returns status.
int32_t fail(int32_t status, const char * what) noexcept;

// Runs f, which returns a count or EAGLE3_OK.
template <typename F> auto guard(F && f) noexcept -> decltype(f()) {
    try {
        return f();
    } catch (const error & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(EAGLE3_E_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(EAGLE3_E_INTERNAL, e.what());
    } catch (...) {
        return fail(EAGLE3_E_INTERNAL, "unknown error");
    }
}

inline session & get(eagle3_session * s) {
    require(s != nullptr, EAGLE3_E_ARGUMENT, "session is NULL");
    return *s->impl;
}

inline const session & get(const eagle3_session * s) {
    return get(const_cast<eagle3_session *>(s));
}

inline text_memory & get(const eagle3_text_memory * m) {
    require(m != nullptr, EAGLE3_E_ARGUMENT, "memory is NULL");
    return *m->impl;
}

inline void not_null(const void * p, const char * name) {
    require(p != nullptr, EAGLE3_E_ARGUMENT, std::string(name) + " is NULL");
}

}  // namespace eagle3
