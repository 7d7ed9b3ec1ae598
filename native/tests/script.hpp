// This is a sampler for tests that says what it is told.
#pragma once

#include "check.hpp"

#include <stdexcept>

// It says its tokens in order, and throws in place of one.
struct script {
    tokens says;
    size_t next = 0, throws_at = SIZE_MAX;
    llama_sampler * sampler = nullptr;

    explicit script(const tokens & t = {}) : says(t) {
        static const llama_sampler_i calls = [] {
            llama_sampler_i i = {};
            i.name            = [](const llama_sampler *) {
                return "script";
            };
            i.apply = [](llama_sampler * s, llama_token_data_array * all) {
                script & self = *(script *) s->ctx;
                if (self.next == self.throws_at) {
                    throw std::runtime_error("the script's");
                }
                CHECK(self.next < self.says.size());
                for (size_t k = 0; k < all->size; ++k) {
                    if (all->data[k].id == self.says[self.next]) {
                        all->selected = (int64_t) k;
                    }
                }
                ++self.next;
            };
            return i;
        }();
        sampler = llama_sampler_init(const_cast<llama_sampler_i *>(&calls), this);
    }
    ~script() { llama_sampler_free(sampler); }
    script(const script &)             = delete;
    script & operator=(const script &) = delete;
};
