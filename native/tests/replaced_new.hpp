// The program's operator new and delete stand before the C++ library's, so that a test can let them fail. The
// test that includes this defines take(), which returns nullptr where memory is to be refused.
#pragma once

#include <cstdlib>
#include <new>

namespace {

void * take(size_t size);

// This is not inlined: GCC would take `free` for the wrong partner of an operator new that it did not inline.
__attribute__((noinline)) void give(void * p) {
    free(p);
}

}  // namespace

void * operator new(size_t size) {
    if (void * p = take(size)) {
        return p;
    }
    throw std::bad_alloc();
}
void * operator new[](size_t size) {
    return operator new(size);
}
void * operator new(size_t size, const std::nothrow_t &) noexcept {
    return take(size);
}
void * operator new[](size_t size, const std::nothrow_t &) noexcept {
    return take(size);
}
void operator delete(void * p) noexcept {
    give(p);
}
void operator delete[](void * p) noexcept {
    give(p);
}
void operator delete(void * p, size_t) noexcept {
    give(p);
}
void operator delete[](void * p, size_t) noexcept {
    give(p);
}
void operator delete(void * p, const std::nothrow_t &) noexcept {
    give(p);
}
void operator delete[](void * p, const std::nothrow_t &) noexcept {
    give(p);
}
